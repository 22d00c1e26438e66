package node

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// logFile is a container's output in the form that the kubelet reads for `kubectl logs`.
type logFile struct {
	path string
	mu   sync.Mutex
	file *os.File
}

func openLog(path string) (*logFile, error) {
	l := &logFile{path: path}
	return l, l.reopen()
}

// reopen follows a rotation: the kubelet has renamed the file.
func (l *logFile) reopen() error {
	file, err := os.OpenFile(l.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file != nil {
		l.file.Close()
	}
	l.file = file
	return nil
}

func (l *logFile) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.file.Close()
}

func (l *logFile) stream(name string) io.Writer { return &logStream{log: l, name: name} }

type logStream struct {
	log  *logFile
	name string
}

// Write records what came in one piece; a line without its end is marked as partial.
func (s *logStream) Write(p []byte) (int, error) {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	now := time.Now().Format(time.RFC3339Nano)
	for _, line := range bytes.SplitAfter(p, []byte("\n")) {
		if len(line) == 0 {
			continue
		}
		tag := "P"
		if line[len(line)-1] == '\n' {
			tag, line = "F", line[:len(line)-1]
		}
		// A log that cannot be written must not end the container.
		fmt.Fprintf(s.log.file, "%s %s %s %s\n", now, s.name, tag, line)
	}
	return len(p), nil
}
