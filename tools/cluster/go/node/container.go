package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	rt "k8s.io/cri-api/pkg/apis/runtime/v1"

	"goodput.dev/cluster/spec"
)

// container is one process, and whatever that process starts.
type container struct {
	id      string
	sandbox *sandbox
	config  *rt.ContainerConfig
	image   Image
	created int64
	log     *logFile
	done    chan struct{}

	mu       sync.Mutex
	cmd      *exec.Cmd
	started  int64
	finished int64
	exit     int32
	// failure is what kept the command from starting at all.
	failure string
}

func (c *container) logPath() string {
	return filepath.Join(c.sandbox.config.LogDirectory, c.config.LogPath)
}

func (c *container) stateNow() rt.ContainerState {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.started == 0:
		return rt.ContainerState_CONTAINER_CREATED
	case c.finished == 0:
		return rt.ContainerState_CONTAINER_RUNNING
	default:
		return rt.ContainerState_CONTAINER_EXITED
	}
}

// running is the container's first process, as the node sees it.
func (c *container) running() (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cmd == nil || c.finished != 0 {
		return 0, fmt.Errorf("container %s is not running", c.id)
	}
	return c.cmd.Process.Pid, nil
}

func (r *Runtime) CreateContainer(_ context.Context, sandboxID string, config *rt.ContainerConfig, _ *rt.PodSandboxConfig) (string, error) {
	image, err := r.images.find(config.Image.Image)
	if err != nil {
		return "", err
	}
	s, err := r.sandbox(sandboxID)
	if err != nil {
		return "", err
	}
	r.mu.Lock()
	id := r.nextID("container")
	r.mu.Unlock()
	c := &container{
		id: id, sandbox: s, config: config, image: image, created: time.Now().UnixNano(), done: make(chan struct{}),
	}
	if err := os.MkdirAll(r.folder(id), 0o700); err != nil {
		return "", err
	}
	if c.log, err = openLog(c.logPath()); err != nil {
		return "", err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.containers[id] = c
	return id, nil
}

func (r *Runtime) StartContainer(_ context.Context, id string) error {
	c, err := r.container(id)
	if err != nil {
		return err
	}
	cmd := exec.Command(r.launcher, "run")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS,
		Setsid:     true,
	}
	cmd.Stdout, cmd.Stderr = c.log.stream("stdout"), c.log.stream("stderr")
	if err := start(cmd, c.describe(r.folder(id))); err != nil {
		c.fail(err)
		return err
	}
	c.mu.Lock()
	c.cmd, c.started = cmd, time.Now().UnixNano()
	c.mu.Unlock()
	go c.wait()
	return nil
}

// fail ends a container that never ran, with the code that container engines give it.
func (c *container) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.started = time.Now().UnixNano()
	c.finished, c.exit, c.failure = c.started, 128, err.Error()
	close(c.done)
}

// describe is the process to start as the launcher needs to know it.
func (c *container) describe(root string) spec.Spec {
	security := c.config.GetLinux().GetSecurityContext()
	s := spec.Spec{
		Root: root, Network: c.sandbox.network.file(), Hostname: c.sandbox.config.Hostname,
		Resolv: c.sandbox.resolv(), Folders: c.image.Folders, ReadOnlyRoot: security.GetReadonlyRootfs(),
		Capabilities: capabilities(security, c.image.User), NoNewPrivileges: security.GetNoNewPrivs(),
		Dir: c.workingDir(), Env: c.environment(), Args: c.arguments(),
	}
	if s.Hostname == "" {
		s.Hostname, _ = os.Hostname()
	}
	for _, m := range c.config.Mounts {
		s.Mounts = append(s.Mounts, spec.Mount{Source: m.HostPath, Target: m.ContainerPath, ReadOnly: m.Readonly})
	}
	return s
}

// arguments: a pod that names a command drops both of the image's words.
func (c *container) arguments() []string {
	command, args := c.config.Command, c.config.Args
	if len(command) == 0 {
		command = c.image.Entrypoint
		if len(args) == 0 {
			args = c.image.Command
		}
	}
	return append(append([]string{}, command...), args...)
}

func (c *container) environment() []string {
	env := []string{"PATH=" + c.image.path(), "HOME=/", "HOSTNAME=" + c.sandbox.config.Hostname}
	for name, value := range c.image.Env {
		env = append(env, name+"="+value)
	}
	for _, e := range c.config.Envs {
		env = append(env, e.Key+"="+string(e.Value))
	}
	return env
}

func (c *container) workingDir() string {
	if c.config.WorkingDir != "" {
		return c.config.WorkingDir
	}
	return "/"
}

func (c *container) wait() {
	_ = c.cmd.Wait() // how it ended is in its state
	c.mu.Lock()
	c.finished = time.Now().UnixNano()
	if ws := c.cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signaled() {
		c.exit = 128 + int32(ws.Signal())
	} else {
		c.exit = int32(c.cmd.ProcessState.ExitCode())
	}
	c.mu.Unlock()
	c.log.close()
	close(c.done)
}

// stop asks the first process, waits as long as it was granted, and then kills the container.
func (c *container) stop(grace time.Duration) {
	pid, err := c.running()
	if err != nil {
		return
	}
	if grace > 0 {
		_ = syscall.Kill(pid, syscall.SIGTERM)
		select {
		case <-c.done:
			return
		case <-time.After(grace):
		}
	}
	// With the first process of its namespace the kernel ends all others.
	_ = syscall.Kill(pid, syscall.SIGKILL)
	<-c.done
}

func (r *Runtime) StopContainer(_ context.Context, id string, timeout int64) error {
	if c, err := r.container(id); err == nil {
		c.stop(time.Duration(timeout) * time.Second)
	}
	return nil
}

func (r *Runtime) RemoveContainer(_ context.Context, id string) error {
	c, err := r.container(id)
	if err != nil {
		return nil // removing what is gone has succeeded
	}
	c.stop(0)
	c.log.close()
	r.mu.Lock()
	delete(r.containers, id)
	r.mu.Unlock()
	return os.RemoveAll(r.folder(id))
}

func (r *Runtime) ContainerStatus(_ context.Context, id string, _ bool) (*rt.ContainerStatusResponse, error) {
	c, err := r.container(id)
	if err != nil {
		return nil, err
	}
	state := c.stateNow()
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &rt.ContainerStatus{
		Id: id, Metadata: c.config.Metadata, State: state, CreatedAt: c.created, StartedAt: c.started,
		FinishedAt: c.finished, ExitCode: c.exit, Image: c.config.Image, ImageRef: c.config.Image.Image,
		ImageId: c.config.Image.Image, Labels: c.config.Labels, Annotations: c.config.Annotations,
		Mounts: c.config.Mounts, LogPath: c.logPath(),
	}
	if state == rt.ContainerState_CONTAINER_EXITED {
		s.Reason = "Completed"
		if c.exit != 0 {
			s.Reason = "Error"
		}
		if c.failure != "" {
			s.Reason, s.Message = "StartError", c.failure
		}
	}
	return &rt.ContainerStatusResponse{Status: s}, nil
}

func (r *Runtime) ReopenContainerLog(_ context.Context, id string) error {
	c, err := r.container(id)
	if err != nil {
		return err
	}
	return c.log.reopen()
}

// start runs the launcher and returns once the command runs, or what kept it from running.
func start(cmd *exec.Cmd, s spec.Spec) error {
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	specRead, specWrite, err := os.Pipe()
	if err != nil {
		return err
	}
	reportRead, reportWrite, err := os.Pipe()
	if err != nil {
		return err
	}
	defer reportRead.Close()
	cmd.ExtraFiles = []*os.File{specRead, reportWrite}
	err = cmd.Start()
	specRead.Close()
	reportWrite.Close()
	if err != nil {
		specWrite.Close()
		return err
	}
	_, err = specWrite.Write(text)
	specWrite.Close()
	report, readErr := io.ReadAll(reportRead)
	if err = errors.Join(err, readErr); err == nil && len(report) == 0 {
		return nil
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	return errors.Join(err, errors.New(string(report)))
}
