-- Argo CD's health check of an LLMService, from its conditions. Add it to the ConfigMap argocd-cm:
--   data:
--     resource.customizations.health.goodput.dev_LLMService: |
--       <this file>
local health = {status = "Progressing", message = "Waiting for the operator"}
local status = obj.status or {}
if status.observedGeneration ~= obj.metadata.generation then
  return health
end
local conditions = {}
for _, condition in ipairs(status.conditions or {}) do
  conditions[condition.type] = condition
end
local function is_true(name)
  return conditions[name] ~= nil and conditions[name].status == "True"
end
if is_true("Stalled") then
  health.status, health.message = "Degraded", conditions.Stalled.message
elseif obj.spec.suspend == true then
  health.status, health.message = "Suspended", "spec.suspend is set"
elseif is_true("Reconciling") then
  health.message = conditions.Reconciling.message
elseif is_true("Ready") then
  health.status, health.message = "Healthy", conditions.Ready.message
elseif conditions.Ready ~= nil then
  health.message = conditions.Ready.message
end
return health
