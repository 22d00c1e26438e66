package node

import (
	"fmt"
	"os/exec"
	"sync"
)

// Network gives every pod of a node a network namespace and an address.
//
// A pod hangs on a point-to-point pair with a route of its own rather than on a bridge: over a
// bridge the answer of a service's pod would go straight to the asking pod, past the translation
// of the service's address, and be refused there.
type Network struct {
	// Node tells the interfaces of one node from those of another: all nodes share a network.
	Node string
	// Prefix is that of the pods' addresses, "10.244.1.", and Gateway the node's own among them.
	Prefix  string
	Gateway string

	addresses *addresses
}

// NewNetwork is a network that gives out the addresses 2 to 254 behind the prefix.
func NewNetwork(node, prefix, gateway string) Network {
	return Network{Node: node, Prefix: prefix, Gateway: gateway, addresses: &addresses{taken: map[int]bool{}}}
}

// addresses are given out in turn, so that one just freed is not met again at once.
type addresses struct {
	mu    sync.Mutex
	last  int
	taken map[int]bool
}

func (a *addresses) take() (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for range 253 {
		a.last = a.last%253 + 1
		if n := a.last + 1; !a.taken[n] {
			a.taken[n] = true
			return n, nil
		}
	}
	return 0, fmt.Errorf("all addresses of the node are taken")
}

func (a *addresses) free(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.taken, n)
}

// attachment is a pod's place in the network; the zero value is the node's own.
type attachment struct {
	number  int
	name    string
	address string
}

// file is what a process opens to join.
func (a attachment) file() string {
	if a.name == "" {
		return ""
	}
	return "/run/netns/" + a.name
}

func (n Network) attach() (attachment, error) {
	number, err := n.addresses.take()
	if err != nil {
		return attachment{}, err
	}
	a := attachment{
		number: number, name: fmt.Sprintf("%s-%d", n.Node, number), address: fmt.Sprintf("%s%d", n.Prefix, number),
	}
	err = shell(`
		ip netns add %[1]s
		ip link add %[1]s type veth peer name eth0 netns %[1]s
		ip link set %[1]s up
		ip route replace %[2]s/32 dev %[1]s
		ip -n %[1]s addr add %[2]s/32 dev eth0
		ip -n %[1]s link set eth0 up
		ip -n %[1]s link set lo up
		ip -n %[1]s route add %[3]s dev eth0
		ip -n %[1]s route add default via %[3]s
		ip netns exec %[1]s sysctl -qw net.ipv4.ip_unprivileged_port_start=0`,
		a.name, a.address, n.Gateway)
	if err != nil {
		n.detach(a)
		return attachment{}, err
	}
	return a, nil
}

func (n Network) detach(a attachment) {
	if a.name == "" {
		return
	}
	// What is already gone needs no second removal.
	_ = shell("ip link del %[1]s || true; ip netns del %[1]s", a.name)
	n.addresses.free(a.number)
}

func shell(format string, args ...any) error {
	script := fmt.Sprintf(format, args...)
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", script, err, out)
	}
	return nil
}
