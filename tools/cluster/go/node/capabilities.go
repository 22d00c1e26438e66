package node

import (
	"slices"

	"golang.org/x/sys/unix"
	rt "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// What container engines grant when nothing is said.
var defaultCapabilities = []string{
	"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE",
	"NET_RAW", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}

var capabilityNumbers = map[string]int{
	"AUDIT_WRITE": unix.CAP_AUDIT_WRITE, "CHOWN": unix.CAP_CHOWN, "DAC_OVERRIDE": unix.CAP_DAC_OVERRIDE,
	"FOWNER": unix.CAP_FOWNER, "FSETID": unix.CAP_FSETID, "IPC_LOCK": unix.CAP_IPC_LOCK, "KILL": unix.CAP_KILL,
	"MKNOD": unix.CAP_MKNOD, "NET_ADMIN": unix.CAP_NET_ADMIN, "NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE,
	"NET_RAW": unix.CAP_NET_RAW, "SETFCAP": unix.CAP_SETFCAP, "SETGID": unix.CAP_SETGID,
	"SETPCAP": unix.CAP_SETPCAP, "SETUID": unix.CAP_SETUID, "SYS_ADMIN": unix.CAP_SYS_ADMIN,
	"SYS_CHROOT": unix.CAP_SYS_CHROOT, "SYS_PTRACE": unix.CAP_SYS_PTRACE,
}

// capabilities are what a container may hold. A user other than root holds none: that much of
// another user's id can be shown where only one id exists.
func capabilities(security *rt.LinuxContainerSecurityContext, imageUser int64) []int {
	user := imageUser
	if u := security.GetRunAsUser(); u != nil {
		user = u.Value
	}
	var all []int
	for c := range unix.CAP_LAST_CAP + 1 {
		all = append(all, c)
	}
	if security.GetPrivileged() {
		return all
	}
	if user != 0 {
		return nil
	}
	add, drop := security.GetCapabilities().GetAddCapabilities(), security.GetCapabilities().GetDropCapabilities()
	kept := map[int]bool{}
	if !slices.Contains(drop, "ALL") {
		for _, name := range defaultCapabilities {
			kept[capabilityNumbers[name]] = true
		}
	}
	for _, name := range drop {
		delete(kept, capabilityNumbers[name])
	}
	if slices.Contains(add, "ALL") {
		return all
	}
	for _, name := range add {
		if number, known := capabilityNumbers[name]; known {
			kept[number] = true
		}
	}
	var numbers []int
	for number := range kept {
		numbers = append(numbers, number)
	}
	return numbers
}
