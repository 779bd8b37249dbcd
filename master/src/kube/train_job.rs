//! A `TrainJob` of Kubeflow Trainer that declares a job: the fields that are read of it, and its
//! `status.trainerStatus`, which tells the job's progress.
//!
//! Kubeflow's controller gives an address for progress, with a token, to the pods of its runtime
//! that are labelled as the trainer alone. Of these it also sets the number, the command and the
//! resources, which are those of the workers here. So the pod of a declaration has another label,
//! and writes the status as the owner that Kubeflow's server is.
//!
//! **Invariant:** no error of a report affects the job. A warning has it once, until one succeeds.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_proto::Status;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::EnvVar;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde::Deserialize;
use serde_json::{Number, Value, json};
use tokio::sync::watch;
use tokio::time::timeout;

use super::client::{Cluster, ClusterError};
use crate::mlflow::{SEND_INTERVAL, wait};

/// A `TrainJob`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct TrainJob {
    pub(super) metadata: ObjectMeta,
    #[serde(default)]
    pub(super) spec: TrainJobSpec,
}

/// What a `TrainJob` asks for.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct TrainJobSpec {
    /// Whether the job is suspended.
    pub suspend: bool,
    /// What its workers are.
    pub trainer: Trainer,
}

/// `spec.trainer` of a `TrainJob`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Trainer {
    /// Image with the training program.
    pub image: Option<String>,
    /// First words of the program.
    pub command: Vec<String>,
    /// Its other words.
    pub args: Vec<String>,
    /// Environment of the workers.
    pub env: Vec<EnvVar>,
    /// Number of pods of workers.
    pub num_nodes: Option<u32>,
    /// Resources of each pod.
    pub resources_per_node: Requirements,
    /// Workers per pod.
    pub num_proc_per_node: Option<u32>,
}

/// Resources as a `TrainJob` has them: amounts are texts or numbers.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Requirements {
    /// Claims of devices.
    pub claims: Vec<Value>,
    /// Limits.
    pub limits: BTreeMap<String, Value>,
    /// Requests.
    pub requests: BTreeMap<String, Value>,
}

impl kube::Resource for TrainJob {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        KIND.into()
    }
    fn group((): &()) -> Cow<'_, str> {
        "trainer.kubeflow.org".into()
    }
    fn version((): &()) -> Cow<'_, str> {
        "v1alpha1".into()
    }
    fn plural((): &()) -> Cow<'_, str> {
        "trainjobs".into()
    }
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// Tells the statuses of a job in the status of the `TrainJob` `name`, the newest at intervals and
/// the last one, until their sender is dropped. `warn` gets each error that follows a success.
pub(super) async fn report(
    cluster: &Cluster,
    name: &str,
    mut statuses: watch::Receiver<Option<Status>>,
    warn: impl Fn(&str),
) {
    let (mut told, mut has_failed) = (None, false);
    let mut is_open = statuses.changed().await.is_ok();
    loop {
        let progress = statuses.borrow_and_update().as_ref().map(progress);
        if let Some(progress) = progress.filter(|progress| told.as_ref() != Some(progress)) {
            match timeout(TIMEOUT, write(cluster, name, &progress)).await {
                Ok(Ok(())) => (told, has_failed) = (Some(progress), false),
                failed => {
                    if !has_failed {
                        let why = match failed {
                            Ok(Err(ClusterError::Forbidden { message, .. })) => {
                                format!("{message}; manifests/kubeflow/rbac.yaml has this right")
                            }
                            Ok(sent) => sent.err().map(|e| e.to_string()).unwrap_or_default(),
                            Err(_) => "no answer in time".into(),
                        };
                        warn(&format!("the TrainJob does not tell the job's progress: {why}"));
                    }
                    has_failed = true;
                }
            }
        }
        if !is_open {
            return;
        }
        let pause = if has_failed { PAUSE_AFTER_ERROR } else { SEND_INTERVAL };
        is_open = wait(&mut statuses, pause).await;
    }
}

async fn write(cluster: &Cluster, name: &str, progress: &Value) -> Result<(), ClusterError> {
    let mut told = progress.clone();
    told["lastUpdatedTime"] = json!(Time(Timestamp::now()));
    let object = json!({
        "apiVersion": <TrainJob as kube::Resource>::api_version(&()),
        "kind": KIND,
        "metadata": {"name": name},
        "status": {"trainerStatus": told},
    });
    let train_jobs: Api<TrainJob> = cluster.api();
    // What the owner has told before, and does not tell again, is removed.
    let params = PatchParams::apply(OWNER).force();
    let written = train_jobs.patch_status(name, &params, &Patch::Apply(object)).await;
    written.map(drop).map_err(|error| cluster.explain("write the status of the TrainJob", error))
}

/// `trainerStatus` without its time. Its metrics have the names that trackers of experiments get.
fn progress(status: &Status) -> Value {
    let has_completed = status.state == "completed";
    let percent = if has_completed { 100.0 } else { (status.progress * 100.0).floor() };
    let mut told = json!({"progressPercentage": percent.clamp(0.0, 100.0) as i32});
    let left = if has_completed { Some(0.0) } else { status.eta_s };
    if let Some(left) = left.filter(|left| left.is_finite()) {
        told["estimatedRemainingSeconds"] = json!(left.round().max(0.0) as i32);
    }
    let training = status.metrics.iter().map(|(name, &mean)| (format!("training/{name}"), mean));
    let validation = status.evaluated.iter().flat_map(|evaluated| &evaluated.metrics);
    let validation =
        validation.filter_map(|(name, mean)| Some((format!("validation/{name}"), (*mean)?)));
    let metrics: Vec<Value> = [("loss", status.loss), ("learning_rate", status.learning_rate)]
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), value?)))
        .chain(training)
        .chain(validation)
        .filter_map(|(name, value)| {
            let name: String = name.chars().take(NAME_CHARS_MAX).collect();
            Some(json!({"name": name, "value": Number::from_f64(value)?.to_string()}))
        })
        .take(METRICS_MAX)
        .collect();
    if !metrics.is_empty() {
        told["metrics"] = metrics.into();
    }
    told
}

/// Name of the kind.
pub(super) const KIND: &str = "TrainJob";
/// Manager of the field, as Kubeflow's server names itself.
const OWNER: &str = "trainer-status";
/// Limits of the definition of `TrainJob`.
const METRICS_MAX: usize = 256;
const NAME_CHARS_MAX: usize = 64;
const PAUSE_AFTER_ERROR: Duration = Duration::from_secs(60);
const TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use elasticdl_proto::Evaluated;
    use tokio::task::JoinHandle;
    use tokio::time::{Instant, sleep};

    use super::super::testing::FakeServer;
    use super::*;

    /// A TrainJob `t`, and the report about it.
    struct Reported {
        fake: Arc<FakeServer>,
        statuses: watch::Sender<Option<Status>>,
        warnings: Arc<Mutex<Vec<String>>>,
        report: JoinHandle<()>,
    }

    impl Reported {
        fn start() -> Self {
            let (fake, cluster) = FakeServer::start();
            fake.put("trainjobs", "t", json!({"metadata": {"name": "t"}, "spec": {}}));
            let (statuses, known) = watch::channel(None);
            let warnings: Arc<Mutex<Vec<String>>> = Arc::default();
            let log = Arc::clone(&warnings);
            let report = tokio::spawn(async move {
                report(&cluster, "t", known, |text| log.lock().unwrap().push(text.into())).await;
            });
            Self { fake, statuses, warnings, report }
        }

        fn tell(&self, status: Status) {
            self.statuses.send_replace(Some(status));
        }

        /// What the TrainJob tells, without the time.
        fn told(&self) -> Value {
            let mut told = self.fake.state().object("trainjobs", "t").unwrap_or_default();
            let mut told = told["status"]["trainerStatus"].take();
            told.as_object_mut().map(|told| told.remove("lastUpdatedTime"));
            told
        }

        /// The times of the requests, from the first one on, in seconds.
        fn seconds(&self) -> Vec<u64> {
            let state = self.fake.state();
            let mut times = state.calls.iter().filter(|(_, call)| call == "PATCH trainjobs");
            let first: Option<Instant> = times.clone().next().map(|(at, _)| *at);
            times.by_ref().map(|(at, _)| (*at - first.unwrap()).as_secs()).collect()
        }

        fn warnings(&self) -> Vec<String> {
            self.warnings.lock().unwrap().clone()
        }

        /// Ends the job, and returns what is reported then.
        async fn end(&mut self) -> Value {
            self.statuses = watch::channel(None).0;
            (&mut self.report).await.unwrap();
            self.told()
        }
    }

    fn running(progress: f64, eta_s: Option<f64>) -> Status {
        Status { state: "running".into(), progress, eta_s, ..Status::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_train_job_tells_the_progress_and_the_metrics_of_its_job() {
        let mut reported = Reported::start();
        let metrics = [("accuracy".into(), Some(0.75)), ("norm".into(), None)].into();
        reported.tell(Status {
            loss: Some(0.5),
            learning_rate: Some(1e-9),
            metrics: [("accuracy".into(), 0.7)].into(),
            evaluated: Some(Evaluated { step: 8, records: 10, metrics }),
            ..running(0.299, Some(61.6))
        });
        sleep(Duration::from_secs(1)).await;
        let expected = json!({
            "progressPercentage": 29, "estimatedRemainingSeconds": 62,
            "metrics": [
                {"name": "loss", "value": "0.5"},
                {"name": "learning_rate", "value": "1e-9"},
                {"name": "training/accuracy", "value": "0.7"},
                {"name": "validation/accuracy", "value": "0.75"},
            ],
        });
        assert_eq!(reported.told(), expected);
        // What is no longer known is no longer told.
        reported.tell(running(0.3, None));
        sleep(SEND_INTERVAL).await;
        assert_eq!(reported.told(), json!({"progressPercentage": 30}));
        // The last status is reported at once.
        reported.tell(Status { state: "completed".into(), ..running(0.999, None) });
        let expected = json!({"progressPercentage": 100, "estimatedRemainingSeconds": 0});
        let end = Instant::now();
        assert_eq!(reported.end().await, expected);
        assert_eq!(end.elapsed(), Duration::ZERO);
        assert_eq!(reported.warnings(), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_status_beyond_the_limits_of_the_definition_is_told_within_them() {
        let reported = Reported::start();
        let long = "ä".repeat(70);
        let many = (0..300).map(|n| (format!("{long}{n}"), f64::MIN_POSITIVE));
        for (progress, eta_s) in
            [(1.7, f64::MAX), (-1.0, -5.0), (f64::NAN, f64::NAN), (0.5, f64::INFINITY)]
        {
            let metrics = many.clone().collect();
            let loss = Some(f64::NAN);
            reported.tell(Status { loss, metrics, ..running(progress, Some(eta_s)) });
            sleep(SEND_INTERVAL).await;
            assert_eq!(reported.warnings(), [""; 0], "{progress} {eta_s}");
            assert_eq!(reported.told()["metrics"].as_array().unwrap().len(), 256);
        }
        assert_eq!(reported.seconds().len(), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn reports_are_rare_and_a_status_that_tells_nothing_new_is_none() {
        let mut reported = Reported::start();
        for n in 0..120 {
            // A new step each tenth of a second, and a new percentage every six seconds.
            reported.tell(Status { step: n, ..running(n as f64 / 6000.0, None) });
            sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(reported.seconds(), [0, 10]);
        assert_eq!(reported.end().await, json!({"progressPercentage": 1}));
    }

    #[tokio::test(start_paused = true)]
    async fn what_prevents_reports_is_told_once_until_one_succeeds() {
        let mut reported = Reported::start();
        let refuse = |times: usize, code: u16| {
            let refusal = ("PATCH trainjobs", code, 0);
            reported.fake.state().throttles.extend(std::iter::repeat_n(refusal, times));
        };
        let tell = async |percent: u32| {
            reported.tell(running(f64::from(percent) / 100.0, None));
            sleep(PAUSE_AFTER_ERROR).await;
        };
        refuse(2, 403);
        tell(1).await;
        tell(2).await;
        let expected = "the TrainJob does not tell the job's progress: too many requests; \
                        manifests/kubeflow/rbac.yaml has this right";
        assert_eq!(reported.warnings(), [expected]);
        tell(3).await;
        assert_eq!(reported.told(), json!({"progressPercentage": 3}));
        // A server that does not answer.
        reported.fake.state().slow.insert("PATCH trainjobs", Duration::from_secs(3600));
        tell(4).await;
        tell(5).await;
        assert_eq!(reported.warnings().len(), 2);
        assert!(reported.warnings()[1].ends_with("no answer in time"), "{:?}", reported.warnings());
        // It delays the end of the job for a short time.
        let end = Instant::now();
        reported.tell(running(0.06, None));
        assert_eq!(reported.end().await, json!({"progressPercentage": 3}));
        assert!(end.elapsed() <= 2 * TIMEOUT, "{:?}", end.elapsed());
        assert_eq!(reported.warnings().len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_job_whose_train_job_is_gone_ends_as_it_would() {
        let mut reported = Reported::start();
        reported.fake.state().drop_all("trainjobs");
        reported.tell(running(0.5, None));
        sleep(SEND_INTERVAL).await;
        assert_eq!((reported.end().await, reported.warnings().len()), (Value::Null, 1));
    }
}
