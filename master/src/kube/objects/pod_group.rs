//! The PodGroup of a gang.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use super::metadata::owned;
use crate::kube::gang::{GangOptions, GangScheduler};

/// The PodGroup of `gang`, which the anchor owns; `None` if the scheduler needs none.
pub(crate) fn pod_group(options: &GangOptions, gang: &str, anchor: &ObjectMeta) -> Option<Value> {
    let api = options.scheduler.group_api()?;
    let core = options.core_pods;
    let mut spec = match options.scheduler {
        GangScheduler::Kueue => return None,
        GangScheduler::Native => json!({"schedulingPolicy": {"gang": {"minCount": core}}}),
        GangScheduler::Volcano => {
            let mut spec = json!({"minMember": core, "minResources": options.core_resources});
            if let Some(queue) = &options.queue {
                spec["queue"] = queue.as_str().into();
            }
            spec
        }
    };
    let has_class = match options.scheduler {
        GangScheduler::Native => options.version != "v1alpha2",
        scheduler => scheduler == GangScheduler::Volcano,
    };
    if let Some(class) = options.priority_class.as_ref().filter(|_| has_class) {
        spec[PRIORITY_CLASS] = class.as_str().into();
    }
    Some(json!({
        "apiVersion": format!("{}/{}", api.group, options.version),
        "kind": "PodGroup",
        "metadata": owned(anchor, gang, "gang"),
        "spec": spec,
    }))
}

/// Key of a PodGroup's specification for its priority class.
pub(crate) const PRIORITY_CLASS: &str = "priorityClassName";

#[cfg(test)]
mod tests;
