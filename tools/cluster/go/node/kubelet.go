package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	cadvisorapi "github.com/google/cadvisor/info/v1"
	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel/trace/noop"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	kubeletapp "k8s.io/kubernetes/cmd/kubelet/app"
	"k8s.io/kubernetes/cmd/kubelet/app/options"
	"k8s.io/kubernetes/pkg/kubelet"
	kubeletconfig "k8s.io/kubernetes/pkg/kubelet/apis/config"
	cadvisortest "k8s.io/kubernetes/pkg/kubelet/cadvisor/testing"
	"k8s.io/kubernetes/pkg/kubelet/cm"
	kubecontainer "k8s.io/kubernetes/pkg/kubelet/container"
	kubeletutil "k8s.io/kubernetes/pkg/kubelet/util"
	"k8s.io/kubernetes/pkg/util/oom"
	"k8s.io/kubernetes/pkg/volume/util/hostutil"
	"k8s.io/kubernetes/pkg/volume/util/subpath"
	"k8s.io/mount-utils"
)

// settings are what the starter of the cluster decides about a node.
type settings struct {
	name, kubeconfig, root, launcher, images string
	prefix, address, clusterDNS              string
	cpu                                      int
	memory, storage, gpus                    string
}

// NewCommand is the kubelet's command line; the flags are ours, not upstream's.
func NewCommand() *cobra.Command {
	var s settings
	cmd := &cobra.Command{
		Use: "kubelet", SilenceUsage: true,
		RunE: func(c *cobra.Command, _ []string) error { return s.run(c.Context()) },
	}
	f := cmd.Flags()
	f.StringVar(&s.name, "name", "", "the node's name")
	f.StringVar(&s.kubeconfig, "kubeconfig", "", "credentials of system:node:NAME")
	f.StringVar(&s.root, "root", "", "folder for volumes, logs and containers")
	f.StringVar(&s.launcher, "launcher", "", "the program that starts containers")
	f.StringVar(&s.images, "images", "", "the image catalogue, a JSON file")
	f.StringVar(&s.prefix, "pods", "", "prefix of the pods' addresses, such as 10.244.0.")
	f.StringVar(&s.address, "address", "", "the node's address, the gateway of its pods")
	f.StringVar(&s.clusterDNS, "cluster-dns", "", "address of the name service")
	f.IntVar(&s.cpu, "cpu", 0, "CPUs to announce")
	f.StringVar(&s.memory, "memory", "", "memory to announce")
	f.StringVar(&s.storage, "storage", "", "ephemeral storage to announce")
	f.StringVar(&s.gpus, "gpus", "0", "nvidia.com/gpu to announce")
	return cmd
}

func (s settings) run(ctx context.Context) error {
	if err := utilfeature.DefaultMutableFeatureGate.Set("KubeletInUserNamespace=true"); err != nil {
		return err
	}
	flags, config, err := s.configure()
	if err != nil {
		return err
	}
	deps, err := s.dependencies()
	if err != nil {
		return err
	}
	if deps.TLSOptions, err = kubeletapp.InitializeTLS(ctx, flags, config); err != nil {
		return err
	}
	server := &options.KubeletServer{KubeletFlags: *flags, KubeletConfiguration: *config}
	if err := kubeletapp.RunKubelet(ctx, server, deps); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func (s settings) configure() (*options.KubeletFlags, *kubeletconfig.KubeletConfiguration, error) {
	flags := options.NewKubeletFlags()
	flags.RootDirectory, flags.HostnameOverride, flags.NodeIP = s.root, s.name, s.address
	flags.CertDirectory = filepath.Join(s.root, "pki")
	flags.MinimumGCAge = metav1.Duration{Duration: time.Minute}
	c, err := options.NewKubeletConfiguration()
	if err != nil {
		return nil, nil, err
	}
	c.StaticPodPath = filepath.Join(s.root, "static")
	c.PodLogsDir = filepath.Join(s.root, "logs")
	for _, folder := range []string{c.StaticPodPath, c.PodLogsDir} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return nil, nil, err
		}
	}
	c.EnableServer, c.Address, c.Port, c.ReadOnlyPort = true, s.address, 10250, 0
	// Only the API server and the pods share a network with the kubelet.
	c.Authentication.Anonymous.Enabled, c.Authorization.Mode = true, "AlwaysAllow"
	c.ClusterDNS, c.ClusterDomain, c.ResolverConfig = []string{s.clusterDNS}, "cluster.local", ""
	c.RegisterNode, c.EnableControllerAttachDetach = true, false
	// No cgroups. The machine's memory and disk are shared with other programs, so a pod is evicted
	// only for data that it stores itself. Measuring its volumes this often loads the disk little.
	c.CgroupsPerQOS, c.EnforceNodeAllocatable = false, nil
	c.EvictionHard, c.ImageGCHighThresholdPercent = map[string]string{}, 100
	c.VolumeStatsAggPeriod = metav1.Duration{Duration: 2 * time.Second}
	// By default 10 seconds, doubling up to 5 minutes: longer than any test waits for a container
	// that it killed before.
	c.CrashLoopBackOff.MaxContainerRestartPeriod = &metav1.Duration{Duration: time.Second}
	return flags, c, nil
}

func (s settings) dependencies() (*kubelet.Dependencies, error) {
	config, err := clientcmd.BuildConfigFromFlags("", s.kubeconfig)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	// A node that is busy must not miss its heartbeat for want of a client's tokens.
	beat := *config
	beat.QPS = -1
	heartbeat, err := kubernetes.NewForConfig(&beat)
	if err != nil {
		return nil, err
	}
	memory, err := resource.ParseQuantity(s.memory)
	if err != nil {
		return nil, fmt.Errorf("--memory: %w", err)
	}
	storage, err := resource.ParseQuantity(s.storage)
	if err != nil {
		return nil, fmt.Errorf("--storage: %w", err)
	}
	gpus, err := resource.ParseQuantity(s.gpus)
	if err != nil {
		return nil, fmt.Errorf("--gpus: %w", err)
	}
	images := &Images{Catalogue: s.images}
	network := NewNetwork(strings.ReplaceAll(s.name, "node-", "n"), s.prefix, s.address)
	run := NewRuntime(s.root, s.launcher, images, network)
	if err := run.ServeStreams(); err != nil {
		return nil, err
	}
	mounter := mount.New("")
	return &kubelet.Dependencies{
		KubeClient: client, HeartbeatClient: heartbeat, EventClient: client.CoreV1(),
		RemoteRuntimeService: run, RemoteImageService: images,
		CAdvisorInterface: machine{
			Fake: &cadvisortest.Fake{NodeName: s.name},
			info: cadvisorapi.MachineInfo{NumCores: s.cpu, MemoryCapacity: uint64(memory.Value())},
		},
		OSInterface: kubecontainer.RealOS{},
		ContainerManager: cm.NewStubContainerManagerWithDevicePluginResource(v1.ResourceList{
			"nvidia.com/gpu": gpus, v1.ResourceEphemeralStorage: storage,
		}),
		VolumePlugins: volumePlugins(), OOMAdjuster: oom.NewFakeOOMAdjuster(),
		Mounter: mounter, Subpather: subpath.New(mounter), HostUtil: hostutil.NewHostUtil(),
		PodStartupLatencyTracker:  kubeletutil.NewPodStartupLatencyTracker(),
		NodeStartupLatencyTracker: kubeletutil.NewNodeStartupLatencyTracker(),
		TracerProvider:            noop.NewTracerProvider(),
	}, nil
}
