// Package node is a Kubernetes node whose container runtime needs no container engine.
//
// The kubelet is Kubernetes' own. The runtime below it starts every container as a process with
// its own mount, process and host name namespaces; the containers of a pod share a network
// namespace with an address. The runtime knows what the kubelet tells it and nothing else: it
// never asks the API server, and never reads what an operator keeps.
//
// What holds as under a container engine:
//   - a container sees its image's folders and this machine's /usr, read-only, and nothing of the
//     home folders, /var, /run or /tmp; a read-only root is read-only;
//   - volumes, read-only mounts, sub-paths, termination messages, resolv.conf, /etc/hosts;
//   - capabilities, and a user other than root has none; no_new_privs;
//   - TERM to the first process, KILL to all of the container after the grace period, and a first
//     process without a handler ignores TERM;
//   - exec, port-forward, logs with rotation;
//   - a pod whose volume outgrows its sizeLimit, or whose volumes and logs together outgrow its
//     limit of ephemeral storage, is evicted.
//
// What does not, and has to be checked from the pod's own description:
//   - an image has no file system of its own: the libraries of /usr are this machine's, and its
//     folders lie where they lie here, over a volume at the same place;
//   - user and group ids: everything runs as the one id that is mapped, so file ownership,
//     fsGroup and runAsUser change nothing but the capabilities;
//   - limits and requests of CPU and memory: they count for scheduling and quality of service
//     only, and no cgroup is made; nor is what a container writes beside its volumes counted;
//   - pressure: a node never runs short of memory, disk or processes, and evicts nothing for it;
//   - seccomp, AppArmor, SELinux, sysctls, host PID and IPC namespaces, shared process namespaces;
//   - huge pages, devices (nvidia.com/gpu is a number), NetworkPolicy, host ports;
//   - pseudo-terminals: `kubectl exec -t` gets pipes; and `kubectl attach`: a container's output is
//     read by `kubectl logs --follow`.
package node

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	internalapi "k8s.io/cri-api/pkg/apis"
	rt "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming"
)

// Runtime serves the container runtime interface inside the kubelet's own process. The embedded
// interface stands for the calls that a kubelet configured as ours never makes.
type Runtime struct {
	internalapi.RuntimeService

	root     string
	launcher string
	images   *Images
	network  Network
	streams  streaming.Server

	mu         sync.Mutex
	created    int
	sandboxes  map[string]*sandbox
	containers map[string]*container
}

// NewRuntime makes a runtime that keeps what it must keep below root.
func NewRuntime(root, launcher string, images *Images, network Network) *Runtime {
	return &Runtime{
		root: root, launcher: launcher, images: images, network: network,
		sandboxes: map[string]*sandbox{}, containers: map[string]*container{},
	}
}

func (r *Runtime) Version(context.Context, string) (*rt.VersionResponse, error) {
	return &rt.VersionResponse{Version: "0.1.0", RuntimeName: "process", RuntimeVersion: "0.1.0", RuntimeApiVersion: "v1"}, nil
}

func (r *Runtime) Status(context.Context, bool) (*rt.StatusResponse, error) {
	return &rt.StatusResponse{Status: &rt.RuntimeStatus{Conditions: []*rt.RuntimeCondition{
		{Type: rt.RuntimeReady, Status: true}, {Type: rt.NetworkReady, Status: true},
	}}}, nil
}

func (r *Runtime) RuntimeConfig(context.Context) (*rt.RuntimeConfigResponse, error) {
	return &rt.RuntimeConfigResponse{Linux: &rt.LinuxRuntimeConfiguration{CgroupDriver: rt.CgroupDriver_CGROUPFS}}, nil
}

func (r *Runtime) UpdateRuntimeConfig(context.Context, *rt.RuntimeConfig) error { return nil }
func (r *Runtime) Close(context.Context) error                                  { return nil }

func (r *Runtime) UpdateContainerResources(context.Context, string, *rt.ContainerResources) error {
	return nil
}

func (r *Runtime) ListPodSandboxStats(context.Context, *rt.PodSandboxStatsFilter) ([]*rt.PodSandboxStats, error) {
	return nil, nil
}

// ListContainerStats names the containers and measures nothing: it is by them that the kubelet
// finds the pods whose volumes and logs it measures itself.
func (r *Runtime) ListContainerStats(ctx context.Context, f *rt.ContainerStatsFilter) ([]*rt.ContainerStats, error) {
	listed, err := r.ListContainers(ctx, &rt.ContainerFilter{
		Id: f.GetId(), PodSandboxId: f.GetPodSandboxId(), LabelSelector: f.GetLabelSelector(),
	})
	var out []*rt.ContainerStats
	for _, c := range listed {
		out = append(out, &rt.ContainerStats{Attributes: &rt.ContainerAttributes{
			Id: c.Id, Metadata: c.Metadata, Labels: c.Labels, Annotations: c.Annotations,
		}})
	}
	return out, err
}

// nextID names a sandbox or a container; with the lock held.
func (r *Runtime) nextID(kind string) string {
	r.created++
	return fmt.Sprintf("%s-%06d", kind, r.created)
}

func (r *Runtime) sandbox(id string) (*sandbox, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.sandboxes[id]; s != nil {
		return s, nil
	}
	return nil, status.Errorf(codes.NotFound, "no sandbox %s", id)
}

func (r *Runtime) container(id string) (*container, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.containers[id]; c != nil {
		return c, nil
	}
	return nil, status.Errorf(codes.NotFound, "no container %s", id)
}

func (r *Runtime) containersOf(sandbox string) []*container {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.DeleteFunc(slices.Collect(maps.Values(r.containers)), func(c *container) bool { return c.sandbox.id != sandbox })
}

func (r *Runtime) ListPodSandbox(_ context.Context, f *rt.PodSandboxFilter) ([]*rt.PodSandbox, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []*rt.PodSandbox
	for _, s := range r.sandboxes {
		if f != nil && (f.Id != "" && f.Id != s.id || f.State != nil && f.State.State != s.state || !selected(f.LabelSelector, s.config.Labels)) {
			continue
		}
		out = append(out, &rt.PodSandbox{
			Id: s.id, Metadata: s.config.Metadata, State: s.state, CreatedAt: s.created,
			Labels: s.config.Labels, Annotations: s.config.Annotations,
		})
	}
	return out, nil
}

func (r *Runtime) ListContainers(_ context.Context, f *rt.ContainerFilter) ([]*rt.Container, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []*rt.Container
	for _, c := range r.containers {
		state := c.stateNow()
		if f != nil && (f.Id != "" && f.Id != c.id || f.PodSandboxId != "" && f.PodSandboxId != c.sandbox.id ||
			f.State != nil && f.State.State != state || !selected(f.LabelSelector, c.config.Labels)) {
			continue
		}
		out = append(out, &rt.Container{
			Id: c.id, PodSandboxId: c.sandbox.id, Metadata: c.config.Metadata, Image: c.config.Image,
			ImageRef: c.config.Image.Image, ImageId: c.config.Image.Image, State: state, CreatedAt: c.created,
			Labels: c.config.Labels, Annotations: c.config.Annotations,
		})
	}
	return out, nil
}

func selected(selector, labels map[string]string) bool {
	for k, v := range selector {
		if labels[k] != v {
			return false
		}
	}
	return true
}

// folder is where the runtime keeps what belongs to one container.
func (r *Runtime) folder(container string) string {
	return filepath.Join(r.root, "containers", container)
}
