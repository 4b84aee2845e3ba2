// Kubelab is a whole Kubernetes control plane, with kubectl, in one static binary, for tests.
//
// It links the unchanged commands of Kubernetes and etcd from their Go modules (versions: go.mod),
// so that a test cluster needs a Go toolchain and a module proxy, and no container registry:
//
//	kubelab etcd|kube-apiserver|kube-scheduler|kube-controller-manager|kubelet|kubectl [flags]
//	kubelab fakecri SOCKET
//
// The flags are those of the real commands. fakecri serves Kubernetes' own fake container runtime
// on a Unix socket, with which a real kubelet comes up Ready without containers. Built and cached
// by tests/support/binaries.py.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	fakeremote "k8s.io/cri-client/pkg/fake"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

const usage = "usage: kubelab " +
	"etcd|kube-apiserver|kube-scheduler|kube-controller-manager|kubelet|kubectl|fakecri"

func main() {
	if len(os.Args) < 2 {
		fail(usage)
	}
	// The commands read os.Args themselves: hand them their own.
	os.Args = os.Args[1:]
	switch os.Args[0] {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-scheduler":
		os.Exit(cli.Run(scheduler.NewSchedulerCommand()))
	case "kube-controller-manager":
		os.Exit(cli.Run(controllers.NewControllerManagerCommand()))
	case "kubelet":
		os.Exit(cli.Run(kubelet.NewKubeletCommand(context.Background())))
	case "kubectl":
		os.Exit(cli.Run(kubectl.NewDefaultKubectlCommand()))
	case "fakecri":
		if len(os.Args) != 2 {
			fail("usage: kubelab fakecri SOCKET")
		}
		serveFakeRuntime("unix://" + os.Args[1])
	default:
		fail(usage)
	}
}

// serveFakeRuntime answers kubelet's runtime and image calls until SIGTERM or SIGINT.
func serveFakeRuntime(endpoint string) {
	runtime := fakeremote.NewFakeRemoteRuntime()
	if err := runtime.Start(endpoint); err != nil {
		fail(err.Error())
	}
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT)
	<-end
	runtime.Stop()
}

func fail(text string) {
	fmt.Fprintln(os.Stderr, text)
	os.Exit(2)
}
