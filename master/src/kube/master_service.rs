//! The Service of a job, to whose address its workers connect. The job's masters create it again if
//! a user deletes it: with its former address, if that is still free, because the running pods
//! know no other.

use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::PostParams;
use tokio::time::{sleep, timeout};
use tracing::warn;

use super::client::{Cluster, ClusterError, is_code};
use super::events::EventRecorder;
use super::leader_lease::LeaseGuard;
use super::objects::{self, Task};
use super::retry::retry;

/// The Service of a job.
#[derive(Clone, Debug)]
pub(crate) struct MasterService {
    cluster: Cluster,
    object: Service,
    recorder: EventRecorder,
}

impl MasterService {
    /// `anchor`: that of the job.
    pub(crate) fn new(
        cluster: &Cluster,
        anchor: &ObjectMeta,
        task: &Task,
        recorder: EventRecorder,
    ) -> Self {
        let name = objects::master_name(&task.job.name);
        let object = objects::service(task, objects::owned(anchor, &name, "master"));
        Self { cluster: cluster.clone(), object, recorder }
    }

    /// The address to which workers connect. Creates the Service if it is missing.
    ///
    /// # Errors
    /// It can't be read or created, or it has no address.
    pub(crate) async fn address(&self) -> Result<String, ClusterError> {
        let doing = "find the job's service";
        let ensured = retry(doing, || async {
            self.ensure(None).await.map_err(|error| self.cluster.explain(doing, error))
        });
        let ip = ip_of(&ensured.await?).ok_or_else(|| ClusterError::Refused {
            doing: doing.into(),
            message: "it has no address".into(),
        })?;
        // An IPv6 address is written in brackets before a port.
        let host = if ip.contains(':') { format!("[{ip}]") } else { ip };
        Ok(format!("{host}:{}", objects::PORT))
    }

    /// Keeps the Service while the guard is valid. Never completes.
    pub(crate) async fn keep(self, mut guard: LeaseGuard) {
        let (mut ip, mut was_refused) = (None, false);
        loop {
            let ensured = guard.during(timeout(CALL_TIMEOUT, self.ensure(ip.clone()))).await;
            match ensured {
                Some(Ok(Ok(service))) => {
                    (ip, was_refused) = (ip_of(&service).or(ip), false);
                }
                Some(Ok(Err(error))) if !was_refused && !is_code(&error, 409) => {
                    was_refused = true;
                    warn!(%error, "the job's Service can't be read or created");
                }
                _ => {}
            }
            sleep(INTERVAL).await;
        }
    }

    /// The Service, which is created if it is missing, with the address `ip` if possible.
    async fn ensure(&self, ip: Option<String>) -> Result<Service, kube::Error> {
        let services: Api<Service> = self.cluster.api();
        let name = self.object.metadata.name.as_deref().unwrap_or_default();
        if let Some(found) = services.get_opt(name).await? {
            return Ok(found);
        }
        let mut object = self.object.clone();
        object.spec.get_or_insert_default().cluster_ip = ip;
        let mut created = services.create(&PostParams::default(), &object).await;
        // Another Service has got the address, or it is being freed.
        if object.spec.as_ref().is_some_and(|spec| spec.cluster_ip.is_some())
            && created.as_ref().is_err_and(|error| is_code(error, 422))
        {
            object.spec.get_or_insert_default().cluster_ip = None;
            created = services.create(&PostParams::default(), &object).await;
        }
        let created = created?;
        let what = format!("the Service {name} was deleted; the master has made it again");
        warn!("{what}");
        self.recorder.record("ServiceRestored", what);
        Ok(created)
    }
}

fn ip_of(service: &Service) -> Option<String> {
    let ip = service.spec.as_ref()?.cluster_ip.clone()?;
    Some(ip).filter(|ip| !ip.is_empty() && ip != "None")
}

const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two looks at the Service: a job at rest makes ten calls a minute at most.
const INTERVAL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::FakeServer;
    use super::*;
    use crate::job::JobSpec;
    use crate::job::testing::spec;

    #[tokio::test(start_paused = true)]
    async fn a_service_that_is_deleted_is_made_again_with_its_address() {
        let (fake, cluster) = FakeServer::start();
        let anchor = serde_json::from_value(json!({"name": "mnist", "uid": "a"})).unwrap();
        let task = Task {
            job: JobSpec { name: "mnist".into(), ..spec() },
            master_timeout: Duration::from_secs(30),
            priority_tiers: None,
            metrics_port: 9100,
            serve_metrics: false,
            tensorboard_dir: None,
            gang: None,
        };
        let service = MasterService::new(&cluster, &anchor, &task, EventRecorder::disabled());
        let name = objects::master_name(&task.job.name);
        let found = || fake.state().object("services", &name);
        // A new master creates it; the server gives it an address.
        assert!(service.address().await.unwrap_err().to_string().contains("no address"));
        let mut object = found().unwrap();
        assert_eq!(object["metadata"]["ownerReferences"][0]["uid"], "a");
        assert_eq!(object["spec"]["selector"]["elasticdl/role"], "master");
        object["spec"]["clusterIP"] = json!("10.0.0.9");
        fake.put("services", &name, object);
        assert_eq!(service.address().await.unwrap(), format!("10.0.0.9:{}", objects::PORT));
        // A leading master has seen its address.
        let keeping = tokio::spawn(service.keep(LeaseGuard::unlimited()));
        sleep(INTERVAL / 2).await;
        for is_free in [true, false] {
            fake.state().remove("services", &name);
            if !is_free {
                fake.state().throttles.push_back(("POST services", 422, 0));
            }
            sleep(INTERVAL).await;
            let address = if is_free { json!("10.0.0.9") } else { json!(null) };
            assert_eq!(found().unwrap()["spec"]["clusterIP"], address);
        }
        keeping.abort();
    }
}
