// Writes what kube-scheduler sends to an extender, as its own types encode it.
//
//	go run . FOLDER      write the requests and an answer of each verb
//	go run . read FILE   decode an answer of ours (filter) the way kube-scheduler does
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	extender "k8s.io/kube-scheduler/extender/v1"
)

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func pod() *v1.Pod {
	deadline := int64(5400)
	grace := int64(45)
	always := v1.ContainerRestartPolicyAlways
	gpu := func(n string) v1.ResourceRequirements {
		list := v1.ResourceList{
			"nvidia.com/gpu":  resource.MustParse(n),
			v1.ResourceCPU:    resource.MustParse("3500m"),
			v1.ResourceMemory: resource.MustParse("12Gi"),
		}
		return v1.ResourceRequirements{Limits: list, Requests: list}
	}
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: "train-0", Namespace: "team-a", UID: types.UID("3f6a7c1e-7d43-4b57-9d2b-3c2f1f0e8a11"),
			ResourceVersion: "81234",
			Labels:          map[string]string{"app": "train"},
			Annotations:     map[string]string{"slurmbridge.dev/account": "team-a", "other.example/x": "1"},
		},
		Spec: v1.PodSpec{
			ServiceAccountName:            "trainer",
			SchedulerName:                 "default-scheduler",
			ActiveDeadlineSeconds:         &deadline,
			TerminationGracePeriodSeconds: &grace,
			InitContainers: []v1.Container{
				{Name: "sidecar", Image: "i", RestartPolicy: &always, Resources: v1.ResourceRequirements{
					Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("250m")}}},
			},
			Containers: []v1.Container{{Name: "main", Image: "i", Resources: gpu("2")}},
		},
		Status: v1.PodStatus{Phase: v1.PodPending},
	}
}

func node(name string) v1.Node {
	return v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"zone": "a"}},
		Status: v1.NodeStatus{
			Allocatable: v1.ResourceList{"nvidia.com/gpu": resource.MustParse("8")},
		},
	}
}

func main() {
	if os.Args[1] == "read" {
		body, err := os.ReadFile(os.Args[2])
		must(err)
		var result extender.ExtenderFilterResult
		must(json.Unmarshal(body, &result))
		names := []string(nil)
		if result.NodeNames != nil {
			names = *result.NodeNames
		}
		fmt.Println("names", names, "nodes", result.Nodes != nil, "failed", result.FailedNodes,
			"unresolvable", result.FailedAndUnresolvableNodes, "error", result.Error)
		return
	}
	names := []string{"gpu-0001", "gpu-0002", "gpu-0003"}
	list := &v1.NodeList{}
	for _, name := range names {
		list.Items = append(list.Items, node(name))
	}
	low := pod()
	low.Name, low.UID = "low", "11111111-2222-3333-4444-555555555555"
	write := func(name string, value any) {
		body, err := json.Marshal(value)
		must(err)
		must(os.WriteFile(filepath.Join(os.Args[1], name+".json"), body, 0o644))
	}
	write("filter_names", extender.ExtenderArgs{Pod: pod(), NodeNames: &names})
	write("filter_nodes", extender.ExtenderArgs{Pod: pod(), Nodes: list})
	write("filter_empty", extender.ExtenderArgs{Pod: pod(), NodeNames: &[]string{}})
	write("bind", extender.ExtenderBindingArgs{
		PodName: "train-0", PodNamespace: "team-a", PodUID: pod().UID, Node: "gpu-0002"})
	write("preempt_meta", extender.ExtenderPreemptionArgs{Pod: pod(),
		NodeNameToMetaVictims: map[string]*extender.MetaVictims{
			"gpu-0001": {Pods: []*extender.MetaPod{{UID: string(low.UID)}}, NumPDBViolations: 1},
			"gpu-0002": {Pods: []*extender.MetaPod{{UID: string(low.UID)}}}}})
	write("preempt_victims", extender.ExtenderPreemptionArgs{Pod: pod(),
		NodeNameToVictims: map[string]*extender.Victims{
			"gpu-0001": {Pods: []*v1.Pod{low}, NumPDBViolations: 1}}})
	write("answer_filter", extender.ExtenderFilterResult{
		NodeNames:   &[]string{"gpu-0002"},
		FailedNodes: extender.FailedNodesMap{}, FailedAndUnresolvableNodes: extender.FailedNodesMap{}})
	write("answer_prioritize", extender.HostPriorityList{{Host: "gpu-0002", Score: 10}, {Host: "gpu-0001", Score: 0}})
	write("answer_bind", extender.ExtenderBindingResult{Error: "no"})
	write("answer_preempt", extender.ExtenderPreemptionResult{
		NodeNameToMetaVictims: map[string]*extender.MetaVictims{
			"gpu-0001": {Pods: []*extender.MetaPod{{UID: string(low.UID)}}, NumPDBViolations: 1}}})
}
