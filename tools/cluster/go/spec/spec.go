// Package spec is what the node tells the launcher: one container, or one command inside it.
package spec

// Mount is a host file or folder at a path of the container.
type Mount struct {
	Source   string
	Target   string
	ReadOnly bool
}

// Spec describes a process to start in a container.
type Spec struct {
	// Root is an empty folder on which the container's root is mounted.
	Root string
	// Network is the file of the pod's network namespace; empty for the node's own.
	Network  string
	Hostname string
	// Resolv is the text of /etc/resolv.conf; empty for the node's own file.
	Resolv string
	// Folders are the image: shown read-only at the paths that they have on this machine.
	Folders      []string
	Mounts       []Mount
	ReadOnlyRoot bool

	// Capabilities are all that the process, and whatever it executes, may ever hold.
	Capabilities    []int
	NoNewPrivileges bool
	// Dir is made when it is missing, as container runtimes do.
	Dir  string
	Env  []string
	Args []string
}

// The launcher reads its Spec from one inherited descriptor and reports on the other what kept
// the command from starting; nothing written there means that it runs.
const (
	SpecDescriptor   = 3
	ReportDescriptor = 4
)
