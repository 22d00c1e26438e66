// Command launcher starts a process inside a container that is nothing but namespaces and mounts.
//
//	launcher run          becomes the first process of a container, in the namespaces it was born in
//	launcher enter PID    runs a command in the container of that process and waits for it
//
// It is a program of its own because it runs for every container and every exec probe: linked
// into the cluster's binary, each would first pay for the start of all of Kubernetes.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"goodput.dev/cluster/spec"
)

func main() {
	// Namespaces and capabilities belong to a thread, so everything happens on this one.
	runtime.LockOSThread()
	report := os.NewFile(spec.ReportDescriptor, "report")
	unix.CloseOnExec(spec.ReportDescriptor)
	code, err := launch(os.Args[1:])
	if err != nil {
		fmt.Fprint(report, err)
		code = 127
	}
	os.Exit(code)
}

func launch(args []string) (int, error) {
	in := os.NewFile(spec.SpecDescriptor, "spec")
	var s spec.Spec
	if err := json.NewDecoder(in).Decode(&s); err != nil {
		return 0, fmt.Errorf("read the container's description: %w", err)
	}
	in.Close()
	switch {
	case len(args) == 1 && args[0] == "run":
		return 0, become(s)
	case len(args) == 2 && args[0] == "enter":
		return enter(args[1], s)
	}
	return 0, errors.New("usage: launcher run | enter PID")
}

// become replaces this process by the container's command; it returns only when that failed.
func become(s spec.Spec) error {
	if s.Network != "" {
		if err := join(s.Network, unix.CLONE_NEWNET); err != nil {
			return err
		}
	}
	if err := unix.Sethostname([]byte(s.Hostname)); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	if err := buildRoot(s); err != nil {
		return err
	}
	if err := os.MkdirAll(s.Dir, 0o755); err != nil && !errors.Is(err, unix.EROFS) {
		return err
	}
	if s.ReadOnlyRoot {
		if err := setReadOnly("/", false); err != nil {
			return err
		}
	}
	path, err := prepare(s)
	if err != nil {
		return err
	}
	return fmt.Errorf("exec %s: %w", path, syscall.Exec(path, s.Args, s.Env))
}

// enter runs a command in the namespaces of a container's process.
func enter(pid string, s spec.Spec) (int, error) {
	// A thread that shares its root with others may not change its mount namespace.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return 0, err
	}
	// All of them are opened before /proc is another one.
	names := []string{"net", "uts", "pid", "mnt"}
	kinds := []int{unix.CLONE_NEWNET, unix.CLONE_NEWUTS, unix.CLONE_NEWPID, unix.CLONE_NEWNS}
	var files []*os.File
	for _, name := range names {
		f, err := os.Open("/proc/" + pid + "/ns/" + name)
		if err != nil {
			return 0, err
		}
		files = append(files, f)
	}
	for i, f := range files {
		if err := unix.Setns(int(f.Fd()), kinds[i]); err != nil {
			return 0, fmt.Errorf("join the %s namespace: %w", names[i], err)
		}
		f.Close()
	}
	path, err := prepare(s)
	if err != nil {
		return 0, err
	}
	c := exec.Cmd{
		Path: path, Args: s.Args, Env: s.Env, Dir: s.Dir,
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
	}
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGTERM)
	if err := c.Start(); err != nil {
		return 0, err
	}
	unix.Close(spec.ReportDescriptor)
	// The node gives up by asking: killed, this process would leave the command behind.
	go func() {
		<-asked
		c.Process.Kill()
	}()
	err = c.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if ws := exit.Sys().(syscall.WaitStatus); ws.Signaled() {
			return 128 + int(ws.Signal()), nil
		}
		return exit.ExitCode(), nil
	}
	return 0, err
}

func join(path string, kind int) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Setns(int(f.Fd()), kind); err != nil {
		return fmt.Errorf("join %s: %w", path, err)
	}
	return nil
}

// prepare moves to the working folder, gives up capabilities and finds the command.
func prepare(s spec.Spec) (string, error) {
	if err := unix.Chdir(s.Dir); err != nil {
		return "", fmt.Errorf("chdir %s: %w", s.Dir, err)
	}
	if len(s.Args) == 0 {
		return "", errors.New("neither the image nor the pod names a command")
	}
	os.Clearenv()
	for _, e := range s.Env {
		if name, value, ok := strings.Cut(e, "="); ok {
			os.Setenv(name, value)
		}
	}
	path, err := exec.LookPath(s.Args[0])
	if err != nil {
		return "", err
	}
	return path, confine(s)
}
