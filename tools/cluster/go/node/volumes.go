package node

import (
	v1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/volume"
	"k8s.io/kubernetes/pkg/volume/configmap"
	"k8s.io/kubernetes/pkg/volume/downwardapi"
	"k8s.io/kubernetes/pkg/volume/emptydir"
	"k8s.io/kubernetes/pkg/volume/hostpath"
	"k8s.io/kubernetes/pkg/volume/projected"
	"k8s.io/kubernetes/pkg/volume/secret"
)

// volumePlugins returns Kubernetes' plugins for the types of volumes that pods may have here.
func volumePlugins() []volume.VolumePlugin {
	plugins := hostpath.ProbeVolumePlugins(volume.VolumeConfig{})
	for _, owned := range [][]volume.VolumePlugin{
		configmap.ProbeVolumePlugins(), downwardapi.ProbeVolumePlugins(), emptydir.ProbeVolumePlugins(),
		projected.ProbeVolumePlugins(), secret.ProbeVolumePlugins(),
	} {
		for _, plugin := range owned {
			plugins = append(plugins, unowned{plugin})
		}
	}
	return plugins
}

// unowned keeps a plugin from giving files to a pod's user and group. Only one id exists here:
// naming another is an error that would keep the pod from starting, and every process has it.
type unowned struct{ volume.VolumePlugin }

func (p unowned) NewMounter(spec *volume.Spec, pod *v1.Pod) (volume.Mounter, error) {
	mounter, err := p.VolumePlugin.NewMounter(spec, pod)
	if err != nil {
		return nil, err
	}
	return unownedMounter{mounter}, nil
}

type unownedMounter struct{ volume.Mounter }

func (m unownedMounter) SetUp(args volume.MounterArgs) error {
	args.FsUser, args.FsGroup = nil, nil
	return m.Mounter.SetUp(args)
}

func (m unownedMounter) SetUpAt(dir string, args volume.MounterArgs) error {
	args.FsUser, args.FsGroup = nil, nil
	return m.Mounter.SetUpAt(dir, args)
}
