// Measures the web metric of an AnalysisTemplate with the code of Argo Rollouts: its arguments, its
// HTTP client and its conditions. The input on stdin is JSON, and the output is the phase.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/argoproj/argo-rollouts/metricproviders/webmetric"
	"github.com/argoproj/argo-rollouts/pkg/apis/rollouts/v1alpha1"
	templateutil "github.com/argoproj/argo-rollouts/utils/template"
	"github.com/sirupsen/logrus"
)

type input struct {
	Metric v1alpha1.Metric     `json:"metric"`
	Args   []v1alpha1.Argument `json:"args"`
	// URL replaces that of the metric, which is a name in a cluster.
	URL string `json:"url"`
}

func main() {
	phase, err := measure()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(phase)
}

func measure() (v1alpha1.AnalysisPhase, error) {
	var given input
	decoder := json.NewDecoder(os.Stdin)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&given); err != nil {
		return "", err
	}
	encoded, err := json.Marshal(given.Metric)
	if err != nil {
		return "", err
	}
	resolved, err := templateutil.ResolveQuotedArgs(string(encoded), given.Args)
	if err != nil {
		return "", err
	}
	var metric v1alpha1.Metric
	if err := json.Unmarshal([]byte(resolved), &metric); err != nil {
		return "", err
	}
	metric.Provider.Web.URL = given.URL
	client, err := webmetric.NewWebMetricHttpClient(metric)
	if err != nil {
		return "", err
	}
	parser, err := webmetric.NewWebMetricJsonParser(metric)
	if err != nil {
		return "", err
	}
	log := *logrus.NewEntry(logrus.New())
	measured := webmetric.NewWebMetricProvider(log, client, parser).Run(nil, metric)
	if measured.Message != "" {
		return "", fmt.Errorf("%s", measured.Message)
	}
	return measured.Phase, nil
}
