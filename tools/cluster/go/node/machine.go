package node

import (
	"time"

	cadvisorapi "github.com/google/cadvisor/info/v1"
	cadvisorapiv2 "github.com/google/cadvisor/info/v2"
	"golang.org/x/sys/unix"
	cadvisortest "k8s.io/kubernetes/pkg/kubelet/cadvisor/testing"
)

// machine announces a size; nothing here enforces it. What is used of it, it does not know.
type machine struct {
	*cadvisortest.Fake
	info cadvisorapi.MachineInfo
}

func (m machine) VersionInfo() (*cadvisorapi.VersionInfo, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return nil, err
	}
	return &cadvisorapi.VersionInfo{
		KernelVersion: unix.ByteSliceToString(name.Release[:]), ContainerOsVersion: "processes of this machine",
	}, nil
}

func (m machine) MachineInfo() (*cadvisorapi.MachineInfo, error) {
	info := m.info
	return &info, nil
}

// ContainerInfoV2 is an answer without a number: without any, the kubelet would not look at what
// pods use either.
func (m machine) ContainerInfoV2(name string, _ cadvisorapiv2.RequestOptions) (map[string]cadvisorapiv2.ContainerInfo, error) {
	now := []*cadvisorapiv2.ContainerStats{{Timestamp: time.Now()}}
	return map[string]cadvisorapiv2.ContainerInfo{name: {Stats: now}}, nil
}
