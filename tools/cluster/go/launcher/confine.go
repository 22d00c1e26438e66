package main

import (
	"fmt"

	"golang.org/x/sys/unix"

	"goodput.dev/cluster/spec"
)

// confine takes every capability away that the container was not given, for good.
func confine(s spec.Spec) error {
	var kept [2]uint32
	for _, c := range s.Capabilities {
		kept[c/32] |= 1 << (c % 32)
	}
	for c := 0; c <= unix.CAP_LAST_CAP; c++ {
		if kept[c/32]&(1<<(c%32)) != 0 {
			continue
		}
		// A kernel may know fewer capabilities than this program.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil && err != unix.EINVAL {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	if s.NoNewPrivileges {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("set no_new_privs: %w", err)
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	for i := range data {
		data[i] = unix.CapUserData{Effective: kept[i], Permitted: kept[i], Inheritable: 0}
	}
	if err := unix.Capset(&header, &data[0]); err != nil {
		return fmt.Errorf("set capabilities: %w", err)
	}
	return nil
}
