package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"goodput.dev/cluster/spec"
)

// What every container sees of this machine, read-only, beside its image's own folders. Home
// folders, /var, /run and /tmp are not among it.
var (
	systemFolders = []string{"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/sys"}
	systemFiles   = []string{
		"/etc/alternatives", "/etc/ca-certificates", "/etc/group", "/etc/ld.so.cache",
		"/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/mime.types",
		"/etc/nsswitch.conf", "/etc/passwd", "/etc/pki", "/etc/protocols", "/etc/services", "/etc/ssl",
	}
	devices = []string{"null", "zero", "full", "random", "urandom", "tty"}
)

// buildRoot makes the container's root on a tmpfs and moves into it.
func buildRoot(s spec.Spec) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("tmpfs", s.Root, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount the root: %w", err)
	}
	for _, path := range []string{"etc", "var", "run", "home", "root", "mnt", "opt"} {
		if err := os.Mkdir(filepath.Join(s.Root, path), 0o755); err != nil {
			return err
		}
	}
	for _, path := range []string{"tmp", "var/tmp"} {
		where := filepath.Join(s.Root, path)
		if err := os.Mkdir(where, 0o755); err != nil {
			return err
		}
		if err := os.Chmod(where, 0o1777); err != nil {
			return err
		}
	}
	if err := os.Symlink("/run", filepath.Join(s.Root, "var/run")); err != nil {
		return err
	}
	if err := showSystem(s.Root); err != nil {
		return err
	}
	if err := mountKernel(s.Root); err != nil {
		return err
	}
	if s.Resolv != "" {
		if err := os.WriteFile(filepath.Join(s.Root, "etc/resolv.conf"), []byte(s.Resolv), 0o644); err != nil {
			return err
		}
	} else if err := bind("/etc/resolv.conf", s.Root, "/etc/resolv.conf", true); err != nil {
		return err
	}
	for _, m := range s.Mounts {
		if err := bind(m.Source, s.Root, m.Target, m.ReadOnly); err != nil {
			return err
		}
	}
	// Last, as a checkout may lie below /tmp, and a volume for /tmp is common.
	for _, folder := range s.Folders {
		if err := bind(folder, s.Root, folder, true); err != nil {
			return err
		}
	}
	return enterRoot(s.Root)
}

func showSystem(root string) error {
	for _, path := range append(systemFolders, systemFiles...) {
		info, err := os.Lstat(path)
		if os.IsNotExist(err) {
			continue
		} else if err != nil {
			return err
		}
		if info.Mode()&os.ModeSymlink != 0 {
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			if err := os.Symlink(to, filepath.Join(root, path)); err != nil {
				return err
			}
			continue
		}
		if err := bind(path, root, path, true); err != nil {
			return err
		}
	}
	return nil
}

// mountKernel gives the container its own /proc, a few devices and shared memory.
func mountKernel(root string) error {
	proc := filepath.Join(root, "proc")
	if err := os.Mkdir(proc, 0o555); err != nil {
		return err
	}
	if err := unix.Mount("proc", proc, "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	for _, name := range devices {
		if err := bind("/dev/"+name, root, "/dev/"+name, false); err != nil {
			return err
		}
	}
	links := map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	}
	for name, to := range links {
		if err := os.Symlink(to, filepath.Join(root, "dev", name)); err != nil {
			return err
		}
	}
	shm := filepath.Join(root, "dev/shm")
	if err := os.Mkdir(shm, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("shm", shm, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777,size=64m"); err != nil {
		return fmt.Errorf("mount /dev/shm: %w", err)
	}
	return nil
}

// bind shows source at target below root, with all that is mounted below source.
func bind(source, root, target string, readOnly bool) error {
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	// A link of the container's own, such as /var/run, must not lead out of it.
	target = strings.Replace(filepath.Clean(target), "/var/run/", "/run/", 1)
	where := filepath.Join(root, target)
	if info.IsDir() {
		err = os.MkdirAll(where, 0o755)
	} else if err = os.MkdirAll(filepath.Dir(where), 0o755); err == nil {
		var f *os.File
		if f, err = os.OpenFile(where, os.O_CREATE, 0o644); err == nil {
			err = f.Close()
		}
	}
	if err != nil {
		return fmt.Errorf("make the mount point %s: %w", target, err)
	}
	if err := unix.Mount(source, where, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount %s at %s: %w", source, target, err)
	}
	if readOnly {
		return setReadOnly(where, true)
	}
	return nil
}

// setReadOnly adds one attribute and leaves the others, some of which a user namespace may not clear.
func setReadOnly(path string, recursive bool) error {
	var flags uint
	if recursive {
		flags = unix.AT_RECURSIVE
	}
	err := unix.MountSetattr(unix.AT_FDCWD, path, flags, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	if err != nil {
		return fmt.Errorf("make %s read-only: %w", path, err)
	}
	return nil
}

func enterRoot(root string) error {
	if err := unix.Chdir(root); err != nil {
		return err
	}
	// The old root is stacked on the new one and then taken away: no folder is needed for it.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot into the container's root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leave the machine's root: %w", err)
	}
	return unix.Chdir("/")
}
