package node

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	internalapi "k8s.io/cri-api/pkg/apis"
	rt "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Image is what a name stands for: folders of this machine and how to start what lies in them.
type Image struct {
	Folders    []string          `json:"folders"`
	Path       []string          `json:"path"`
	Env        map[string]string `json:"env"`
	Entrypoint []string          `json:"entrypoint"`
	Command    []string          `json:"command"`
	User       int64             `json:"user"`
}

func (i Image) path() string {
	return strings.Join(append(append([]string{}, i.Path...), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"), ":")
}

// Images is a catalogue in a file. It is read anew on each look, so that a test can publish an
// image while the cluster runs; only what was pulled on this node is present on it.
type Images struct {
	internalapi.ImageManagerService
	Catalogue string
}

func (i *Images) read() (map[string]Image, error) {
	text, err := os.ReadFile(i.Catalogue)
	if err != nil {
		return nil, err
	}
	var all map[string]Image
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, fmt.Errorf("%s: %w", i.Catalogue, err)
	}
	return all, nil
}

func (i *Images) find(name string) (Image, error) {
	all, err := i.read()
	if err != nil {
		return Image{}, err
	}
	if image, ok := all[name]; ok {
		return image, nil
	}
	// The kubelet adds the tag that it was not given.
	if image, ok := all[strings.TrimSuffix(name, ":latest")]; ok {
		return image, nil
	}
	var names []string
	for n := range all {
		names = append(names, n)
	}
	sort.Strings(names)
	return Image{}, status.Errorf(codes.NotFound, "image %q is not in this cluster's catalogue, which has: %s", name, strings.Join(names, ", "))
}

func (i *Images) ImageStatus(_ context.Context, s *rt.ImageSpec, _ bool) (*rt.ImageStatusResponse, error) {
	image, err := i.find(s.Image)
	if status.Code(err) == codes.NotFound {
		return &rt.ImageStatusResponse{}, nil
	} else if err != nil {
		return nil, err
	}
	return &rt.ImageStatusResponse{Image: describeImage(s.Image, image)}, nil
}

func describeImage(name string, image Image) *rt.Image {
	return &rt.Image{Id: name, RepoTags: []string{name}, Size: 1, Uid: &rt.Int64Value{Value: image.User}, Username: username(image.User)}
}

// username is empty for root, so that runAsNonRoot refuses an image that says nothing.
func username(user int64) string {
	if user == 0 {
		return ""
	}
	return strconv.FormatInt(user, 10)
}

func (i *Images) PullImage(_ context.Context, s *rt.ImageSpec, _ *rt.AuthConfig, _ *rt.PodSandboxConfig) (string, error) {
	if _, err := i.find(s.Image); err != nil {
		return "", err
	}
	return s.Image, nil
}

func (i *Images) ListImages(context.Context, *rt.ImageFilter) ([]*rt.Image, error) {
	all, err := i.read()
	if err != nil {
		return nil, err
	}
	var out []*rt.Image
	for name, image := range all {
		out = append(out, describeImage(name, image))
	}
	return out, nil
}

// RemoveImage has nothing to remove: the folders are not the node's.
func (i *Images) RemoveImage(context.Context, *rt.ImageSpec) error { return nil }

// ImageFsInfo: images take no room of their own.
func (i *Images) ImageFsInfo(context.Context) (*rt.ImageFsInfoResponse, error) {
	none := &rt.FilesystemUsage{
		Timestamp: time.Now().UnixNano(), FsId: &rt.FilesystemIdentifier{Mountpoint: "/"}, UsedBytes: &rt.UInt64Value{},
	}
	filesystems := []*rt.FilesystemUsage{none}
	return &rt.ImageFsInfoResponse{ImageFilesystems: filesystems, ContainerFilesystems: filesystems}, nil
}

func (i *Images) Close(context.Context) error { return nil }
