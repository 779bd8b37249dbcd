//! What worker pods are made from.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::job::LaunchId;
use crate::kube::gang::GangOptions;
use crate::kube::objects;
use crate::kube::priority_tiers::PriorityTiers;

/// Everything that a worker pod is made from, except its launch and slot.
#[derive(Clone, Debug)]
pub(crate) struct PodFactory {
    /// Template that all worker pods share.
    pub(crate) template: Pod,
    /// The first slot of the table servers, which come after all others, and the template of their
    /// pods.
    pub(crate) table_servers: Option<(u32, Pod)>,
    /// Metadata of their owner.
    pub(crate) anchor: ObjectMeta,
    /// Address of the master, `host:port`.
    pub(crate) master: String,
    /// Minimum number of workers: the job's core.
    pub(crate) min_workers: u32,
    /// Priority classes by slot. `None`: all pods have the template's class.
    pub(crate) priority_tiers: Option<PriorityTiers>,
    /// How pods are placed together. `None`: each pod by itself.
    pub(crate) gang: Option<GangOptions>,
}

impl PodFactory {
    /// Pods with one container, for tests.
    #[cfg(test)]
    pub(crate) fn for_tests(anchor: ObjectMeta, min_workers: u32) -> Self {
        let template = serde_json::json!({"spec": {"containers": [{"name": "worker"}]}});
        Self {
            template: serde_json::from_value(template).expect("it is a pod"),
            table_servers: None,
            anchor,
            master: "10.0.0.1:7070".into(),
            min_workers,
            priority_tiers: None,
            gang: None,
        }
    }

    /// Builds the pod of a launch, as a member of this gang, if any.
    pub(super) fn pod(&self, launch: LaunchId, slot: u32, gang: Option<&str>) -> Pod {
        let template = self.table_server(slot).unwrap_or(&self.template);
        let mut pod = objects::worker_pod(template, launch, slot, &self.anchor, &self.master);
        if let Some(class) = self.class(slot) {
            pod.spec.get_or_insert_default().priority_class_name = Some(class);
        }
        if let Some(options) = &self.gang {
            options.mark(&mut pod, gang, slot < self.min_workers);
        }
        pod
    }

    /// The template of a table server's pod, if this slot is that of one.
    fn table_server(&self, slot: u32) -> Option<&Pod> {
        let (first, template) = self.table_servers.as_ref()?;
        (slot >= *first).then_some(template)
    }

    /// Name of the pod of a launch.
    pub(super) fn name(&self, launch: LaunchId) -> String {
        objects::worker_name(self.anchor.name.as_deref().unwrap_or_default(), launch)
    }

    /// Uid of the pods' owner.
    pub(super) fn owner(&self) -> &str {
        self.anchor.uid.as_deref().unwrap_or_default()
    }

    /// Priority class that the tiers assign to a slot; to table servers, that of the core.
    pub(super) fn class(&self, slot: u32) -> Option<String> {
        let tiers = self.priority_tiers.as_ref()?;
        match self.table_server(slot) {
            Some(_) => Some(tiers.core.clone()),
            None => Some(tiers.class(slot, self.min_workers).into()),
        }
    }

    /// Removes a class that the cluster does not have from the tiers. Returns what workers have
    /// instead; `None` if the class is not in the tiers any more.
    pub(super) fn remove_class(&mut self, missing: &str) -> Option<String> {
        let tiers = self.priority_tiers.as_ref()?;
        if tiers.core != missing && tiers.tiers.iter().all(|tier| tier != missing) {
            return None;
        }
        let shorter = tiers.without(missing);
        let instead = match &shorter {
            Some(PriorityTiers { core, tiers, .. }) => {
                format!("workers have {core} or {}", tiers.join(", "))
            }
            None => "workers have no class by slot".into(),
        };
        self.priority_tiers = shorter;
        Some(instead)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn table_servers_have_their_template_and_the_class_of_the_core() {
        let template = |name: &str| {
            serde_json::from_value(json!({"spec": {"containers": [{"name": name}]}})).unwrap()
        };
        let factory = PodFactory {
            template: template("worker"),
            table_servers: Some((6, template("server"))),
            anchor: ObjectMeta { name: Some("j".into()), ..ObjectMeta::default() },
            master: "10.0.0.1:7070".into(),
            min_workers: 2,
            priority_tiers: Some(PriorityTiers::shipped()),
            gang: None,
        };
        let pod = |slot| {
            let spec = factory.pod(LaunchId(9), slot, None).spec.unwrap();
            (spec.containers[0].name.clone(), spec.priority_class_name.unwrap())
        };
        let core = PriorityTiers::shipped().core;
        assert_eq!(pod(0), ("worker".into(), core.clone()));
        let (name, class) = pod(5);
        assert_eq!((&*name, class == core), ("worker", false));
        assert_eq!(pod(6), ("server".into(), core.clone()));
        assert_eq!(pod(7), ("server".into(), core));
    }
}
