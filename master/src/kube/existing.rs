//! A job that exists already, compared with one that is asked for.

use serde_json::Value;

use super::anchor::{Anchor, Data, SUMMARY};
use super::client::{Cluster, ClusterError};
use super::differences::{Difference, differences};
use super::objects::Objects;
use super::submit::was_refused;

/// A job that exists already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExistingJob {
    /// Its data, as its anchor has them.
    pub data: Data,
    /// The options in which it differs from the job that is asked for.
    pub differences: Vec<Difference>,
}

impl ExistingJob {
    /// Finds the job `name`, and compares it with one of these objects. `None`: there is none, or
    /// its input was refused, so that its name is free.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub async fn find(
        cluster: &Cluster,
        name: &str,
        objects: &Objects,
    ) -> Result<Option<Self>, ClusterError> {
        match Anchor::new(cluster, name).read().await {
            Ok(anchor) => {
                let data = anchor.data.unwrap_or_default();
                let asked = objects.anchor.data.clone().unwrap_or_default();
                let differences = differences(&data, &asked);
                Ok((!was_refused(&data)).then_some(Self { data, differences }))
            }
            Err(ClusterError::NoSuchJob { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// How the job has ended, such as `completed`. `None`: it has not.
    #[must_use]
    pub fn ended(&self) -> Option<String> {
        let summary: Value = serde_json::from_str(self.data.get(SUMMARY)?).unwrap_or_default();
        Some(summary["state"].as_str().unwrap_or("ended").to_owned())
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::batch::v1::Job;
    use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service};
    use serde_json::json;

    use super::super::objects::TASK;
    use super::super::testing::FakeServer;
    use super::*;

    #[tokio::test]
    async fn a_job_that_has_ended_exists_and_one_that_was_refused_does_not() {
        let (fake, cluster) = FakeServer::start();
        let anchor = |seed: u32| Data::from([(TASK.into(), json!({"seed": seed}).to_string())]);
        let objects = Objects {
            job: Job::default(),
            anchor: ConfigMap { data: Some(anchor(7)), ..ConfigMap::default() },
            secret: Secret::default(),
            service: Service::default(),
            network_policies: Vec::new(),
            access: None,
        };
        let found = async || ExistingJob::find(&cluster, "j", &objects).await.unwrap();
        assert_eq!(found().await, None);
        let put = |state: &str, steps: u64| {
            let mut data = anchor(0);
            let summary = json!({"state": state, "steps": steps}).to_string();
            data.insert(SUMMARY.into(), summary);
            fake.put("configmaps", "j", json!({"metadata": {"name": "j"}, "data": data}));
        };
        put("refused", 0);
        assert_eq!(found().await, None);
        put("failed", 0);
        let failed = found().await.unwrap();
        assert_eq!(failed.ended().as_deref(), Some("failed"));
        let told: Vec<String> = failed.differences.iter().map(ToString::to_string).collect();
        assert_eq!(told, ["`seed` is 0, not 7"]);
        fake.put("configmaps", "j", json!({"metadata": {"name": "j"}, "data": anchor(7)}));
        let running = found().await.unwrap();
        assert_eq!((running.ended(), running.differences), (None, Vec::new()));
    }
}
