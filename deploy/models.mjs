// Validates the custom resources in objects.json (tests/deploy/write.py makes it) with the models that @kubernetes-models
// makes of the CRDs. check.sh copies this file beside the packages and runs it there. Ends with 1 when an object is wrong,
// or when there was none of some kind.
import fs from "node:fs";
import process from "node:process";
import { HTTPRoute } from "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1";
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1";
import { PodMonitor, PrometheusRule } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";

const MODELS = { HTTPRoute, ScaledObject, PodMonitor, PrometheusRule };

const checked = Object.fromEntries(Object.keys(MODELS).map((kind) => [kind, 0]));
let failed = 0;
for (const [source, documents] of Object.entries(JSON.parse(fs.readFileSync("objects.json", "utf8")))) {
  for (const document of documents.filter((each) => each.kind in MODELS)) {
    checked[document.kind] += 1;
    try {
      new MODELS[document.kind](document).validate();
    } catch (error) {
      failed += 1;
      console.error(`${source}: ${document.kind}: ${error.message}`);
    }
  }
}
for (const [kind, count] of Object.entries(checked)) {
  console.log(`${kind}: ${count} checked`);
  if (count === 0) failed += 1;
}
process.exit(failed ? 1 : 0);
