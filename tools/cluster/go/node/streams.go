package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	rt "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"
)

// ServeStreams starts what `kubectl exec` and `port-forward` are led to, on the node's loopback.
func (r *Runtime) ServeStreams() error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	address := listener.Addr().String()
	listener.Close()
	config := streaming.DefaultConfig
	config.Addr = address
	if r.streams, err = streaming.NewServer(config, streams{r}); err != nil {
		return err
	}
	go func() {
		if err := r.streams.Start(true); err != nil {
			fmt.Fprintln(os.Stderr, "the stream server ended:", err)
		}
	}()
	return nil
}

func (r *Runtime) Exec(_ context.Context, req *rt.ExecRequest) (*rt.ExecResponse, error) {
	return r.streams.GetExec(req)
}

func (r *Runtime) Attach(_ context.Context, req *rt.AttachRequest) (*rt.AttachResponse, error) {
	return r.streams.GetAttach(req)
}

func (r *Runtime) PortForward(_ context.Context, req *rt.PortForwardRequest) (*rt.PortForwardResponse, error) {
	return r.streams.GetPortForward(req)
}

func (r *Runtime) ExecSync(ctx context.Context, id string, command []string, timeout time.Duration) ([]byte, []byte, error) {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	var out, errs bytes.Buffer
	err := r.execute(ctx, id, command, nil, &out, &errs)
	if ctx.Err() == context.DeadlineExceeded {
		err = status.Errorf(codes.DeadlineExceeded, "%v did not end within %v", command, timeout)
	}
	return out.Bytes(), errs.Bytes(), err
}

// execute runs a command in a container; an exit code other than 0 is an error that carries it.
func (r *Runtime) execute(ctx context.Context, id string, command []string, in io.Reader, out, errs io.Writer) error {
	c, err := r.container(id)
	if err != nil {
		return err
	}
	pid, err := c.running()
	if err != nil {
		return err
	}
	s := c.describe("")
	s.Args = command
	cmd := exec.CommandContext(ctx, r.launcher, "enter", strconv.Itoa(pid))
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Stdout, cmd.Stderr = out, errs
	// What the command left running may hold its pipes open for ever.
	cmd.WaitDelay = time.Second
	if in != nil {
		// Not cmd.Stdin: waiting for a client that never closes its end would be waiting for ever.
		pipe, err := cmd.StdinPipe()
		if err != nil {
			return err
		}
		go func() {
			_, _ = io.Copy(pipe, in)
			pipe.Close()
		}()
	}
	if err := start(cmd, s); err != nil {
		// As a shell says it: a code alone would not tell what was not found.
		if errs != nil {
			fmt.Fprintln(errs, err)
		}
		return utilexec.CodeExitError{Err: err, Code: 127}
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return utilexec.CodeExitError{Err: fmt.Errorf("%v: %w", command, err), Code: exit.ExitCode()}
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		return nil
	}
	return err
}

// streams is the runtime as the stream server calls it.
type streams struct{ runtime *Runtime }

func (s streams) Exec(ctx context.Context, id string, command []string, in io.Reader, out, errs io.WriteCloser, tty bool, _ <-chan remotecommand.TerminalSize) error {
	if tty {
		errs = out
	}
	return s.runtime.execute(ctx, id, command, in, writer(out), writer(errs))
}

// writer returns an untyped nil for a stream that was not requested.
func writer(w io.WriteCloser) io.Writer {
	if w == nil {
		return nil
	}
	return w
}

func (s streams) Attach(context.Context, string, io.Reader, io.WriteCloser, io.WriteCloser, bool, <-chan remotecommand.TerminalSize) error {
	return status.Error(codes.Unimplemented, "this runtime cannot attach; read the output with kubectl logs --follow")
}

func (s streams) PortForward(ctx context.Context, id string, port int32, stream io.ReadWriteCloser) error {
	defer stream.Close()
	box, err := s.runtime.sandbox(id)
	if err != nil {
		return err
	}
	conn, err := dialIn(ctx, box.network.file(), fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	defer conn.Close()
	go func() {
		_, _ = io.Copy(conn, stream)
		_ = conn.(*net.TCPConn).CloseWrite()
	}()
	_, err = io.Copy(stream, conn)
	return err
}

// dialIn connects from inside a network namespace. A socket keeps the namespace in which it was
// made, so only the thread that makes it has to visit; it is given up rather than led back.
func dialIn(ctx context.Context, network, address string) (net.Conn, error) {
	if network == "" {
		return (&net.Dialer{}).DialContext(ctx, "tcp", address)
	}
	type result struct {
		conn net.Conn
		err  error
	}
	dialed := make(chan result, 1)
	go func() {
		runtime.LockOSThread()
		file, err := os.Open(network)
		if err == nil {
			err = unix.Setns(int(file.Fd()), unix.CLONE_NEWNET)
			file.Close()
		}
		if err != nil {
			dialed <- result{err: err}
			return
		}
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		dialed <- result{conn, err}
	}()
	r := <-dialed
	return r.conn, r.err
}
