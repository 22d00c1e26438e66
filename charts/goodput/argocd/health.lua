-- Argo CD's view of an LLMService, by kstatus' conditions. In the ConfigMap argocd-cm:
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
local function holds(name)
  return conditions[name] ~= nil and conditions[name].status == "True"
end
if holds("Stalled") then
  health.status, health.message = "Degraded", conditions.Stalled.message
elseif obj.spec.suspend == true then
  health.status, health.message = "Suspended", "spec.suspend is set"
elseif holds("Reconciling") then
  health.message = conditions.Reconciling.message
elseif holds("Ready") then
  health.status, health.message = "Healthy", conditions.Ready.message
elseif conditions.Ready ~= nil then
  health.message = conditions.Ready.message
end
return health
