package node

import (
	"context"
	"os"
	"strings"
	"time"

	rt "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// sandbox is a pod: what its containers share.
type sandbox struct {
	id      string
	config  *rt.PodSandboxConfig
	network attachment
	created int64
	// state is guarded by the runtime's lock.
	state rt.PodSandboxState
}

func (s *sandbox) onNodeNetwork() bool {
	return s.config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetNetwork() == rt.NamespaceMode_NODE
}

// resolv is the text of the pod's /etc/resolv.conf, or nothing for the node's.
func (s *sandbox) resolv() string {
	dns := s.config.GetDnsConfig()
	var b strings.Builder
	for _, server := range dns.GetServers() {
		b.WriteString("nameserver " + server + "\n")
	}
	if len(dns.GetSearches()) > 0 {
		b.WriteString("search " + strings.Join(dns.Searches, " ") + "\n")
	}
	if len(dns.GetOptions()) > 0 {
		b.WriteString("options " + strings.Join(dns.Options, " ") + "\n")
	}
	return b.String()
}

func (r *Runtime) RunPodSandbox(_ context.Context, config *rt.PodSandboxConfig, _ string) (string, error) {
	s := &sandbox{config: config, created: time.Now().UnixNano()}
	if !s.onNodeNetwork() {
		var err error
		if s.network, err = r.network.attach(); err != nil {
			return "", err
		}
	}
	if err := os.MkdirAll(config.LogDirectory, 0o755); err != nil {
		return "", err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s.id = r.nextID("pod")
	r.sandboxes[s.id] = s
	return s.id, nil
}

func (r *Runtime) StopPodSandbox(ctx context.Context, id string) error {
	s, err := r.sandbox(id)
	if err != nil {
		return nil // stopping what is gone has succeeded
	}
	for _, c := range r.containersOf(id) {
		c.stop(0)
	}
	r.mu.Lock()
	ready := s.state == rt.PodSandboxState_SANDBOX_READY
	s.state = rt.PodSandboxState_SANDBOX_NOTREADY
	r.mu.Unlock()
	if ready {
		r.network.detach(s.network)
	}
	return nil
}

func (r *Runtime) RemovePodSandbox(ctx context.Context, id string) error {
	if err := r.StopPodSandbox(ctx, id); err != nil {
		return err
	}
	for _, c := range r.containersOf(id) {
		if err := r.RemoveContainer(ctx, c.id); err != nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.sandboxes, id)
	return nil
}

func (r *Runtime) PodSandboxStatus(_ context.Context, id string, _ bool) (*rt.PodSandboxStatusResponse, error) {
	s, err := r.sandbox(id)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return &rt.PodSandboxStatusResponse{Status: &rt.PodSandboxStatus{
		Id: id, Metadata: s.config.Metadata, State: s.state, CreatedAt: s.created,
		Network: &rt.PodSandboxNetworkStatus{Ip: s.network.address},
		Linux: &rt.LinuxPodSandboxStatus{Namespaces: &rt.Namespace{
			Options: s.config.GetLinux().GetSecurityContext().GetNamespaceOptions(),
		}},
		Labels: s.config.Labels, Annotations: s.config.Annotations,
	}}, nil
}
