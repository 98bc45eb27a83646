// node deploy/models.cjs DIRECTORY: validates the custom resources in the directory's YAML files with the models that
// @kubernetes-models makes of the CRDs. Ends with 1 when one is wrong, or when there was none of some kind.
"use strict";
const fs = require("node:fs");
const path = require("node:path");
const yaml = require("js-yaml");

const MODELS = {
  "keda.sh/v1alpha1/ScaledObject": () => require("@kubernetes-models/keda/keda.sh/v1alpha1").ScaledObject,
  "monitoring.coreos.com/v1/PodMonitor": () =>
    require("@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1").PodMonitor,
  "monitoring.coreos.com/v1/PrometheusRule": () =>
    require("@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1").PrometheusRule,
  "gateway.networking.k8s.io/v1/HTTPRoute": () =>
    require("@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1").HTTPRoute,
};

const seen = {};
let failed = 0;
const folder = process.argv[2];
for (const name of fs.readdirSync(folder).filter((each) => each.endsWith(".yaml"))) {
  for (const document of yaml.loadAll(fs.readFileSync(path.join(folder, name), "utf8"))) {
    const kind = `${document.apiVersion}/${document.kind}`;
    if (!(kind in MODELS)) continue;
    seen[kind] = (seen[kind] || 0) + 1;
    try {
      new (MODELS[kind]())(document).validate();
    } catch (error) {
      failed += 1;
      console.error(`${name}: ${document.kind}: ${error.message}`);
    }
  }
}
for (const kind of Object.keys(MODELS)) {
  console.log(`${kind}: ${seen[kind] || 0} checked`);
  if (!seen[kind]) failed += 1;
}
process.exit(failed ? 1 : 0);
