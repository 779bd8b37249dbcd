//! `elasticdl declare`: carries out the job that a batch/v1 Job declares, in the pod of the Job.

use std::convert::Infallible;
use std::time::Duration;

use elasticdl_master::kube::anchor::Anchor;
use elasticdl_master::kube::client::{Cluster, ClusterChoice, ClusterError};
use elasticdl_master::kube::declaration::{Changeable, Declaration, Holder, OPTIONS};
use elasticdl_master::kube::existing::ExistingJob;
use elasticdl_master::kube::objects::{Objects, Request, Task};
use elasticdl_master::kube::{master_pods, submit};
use tokio::time::{Instant, sleep};
use toml::{Table, Value};

use super::cluster_job::{self, pod_options};
use super::request::StartRequest;
use crate::backend::{self, FollowOutput};
use crate::process::{
    EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, Failure, cannot, new_runtime,
    print_line, print_warning,
};

/// Submits the declared job, or takes up the one that an earlier pod has submitted, carries changes
/// of the declaration over to it, and shows it until it ends. Returns its exit code.
pub(crate) fn declare(read: ReadOptions) -> Result<u8, Failure> {
    new_runtime()?.block_on(async {
        let cluster = Cluster::connect(&ClusterChoice::default()).await?;
        let pod = std::fs::read_to_string(HOST_NAME).map_err(cannot("read the pod's name"))?;
        let declaration = Declaration::of_pod(&cluster, pod.trim()).await?;
        let declaration = declaration.ok_or_else(|| {
            Failure::usage(format!(
                "the pod {} belongs to no Job; `elasticdl declare` is the command of a Job that \
                 has the annotation {OPTIONS} (see manifests/README.md)",
                pod.trim()
            ))
        })?;
        let declared = DeclaredJob { cluster, declaration, read };
        let options = declared.declaration.options().await?;
        let known = options.clone();
        let ended = match declared.take_up(options).await {
            Ok(()) => declared.follow(known).await,
            Err(end) => end,
        };
        if let End::Final(Err(failure)) = &ended {
            declared.declaration.record("JobFailed", &failure.text).await;
        }
        match ended {
            End::Final(Ok(EXIT_OK)) => Ok(EXIT_OK),
            End::Final(result) => {
                declared.declaration.fail().await;
                result
            }
            End::Passing(result) => result,
        }
    })
}

/// A job that a Job declares.
struct DeclaredJob {
    cluster: Cluster,
    declaration: Declaration,
    read: ReadOptions,
}

/// Reads the job that options of this origin ask for.
type ReadOptions = fn(&str, Table) -> Result<StartRequest, Failure>;

/// How the pod of a declaration ends.
enum End {
    /// The Job ends with it.
    Final(Result<u8, Failure>),
    /// The Job replaces it.
    Passing(Result<u8, Failure>),
}

impl From<ClusterError> for End {
    fn from(error: ClusterError) -> Self {
        // What is missing may follow: an administrator, or the next object of a release, makes it.
        Self::Passing(Err(Failure::failed(error.to_string())))
    }
}

impl DeclaredJob {
    /// Name of the job.
    fn name(&self) -> &str {
        &self.declaration.name
    }

    /// Ensures that the job exists, and is as these options ask for.
    async fn take_up(&self, options: Option<String>) -> Result<(), End> {
        let invalid = |failure| End::Final(Err(failure));
        let asked = self.parse(options.clone(), None).map_err(invalid)?;
        let give_up = Instant::now() + OTHER_TIMEOUT;
        loop {
            let why = match self.declaration.holder(self.name()).await? {
                Holder::Declaration => {
                    print_line(&format!("the job {} exists already", self.name()));
                    self.declaration.outlive_pods().await;
                    self.carry_over(options).await;
                    return Ok(());
                }
                Holder::CutOff => {
                    submit::delete(&self.cluster, self.name()).await?;
                    continue;
                }
                Holder::Other => {
                    let namespace = &self.cluster.namespace;
                    format!(
                        "the namespace {namespace} has another job {0}, which this Job does not \
                         declare: `elasticdl delete {0} --namespace {namespace}` removes it",
                        self.name()
                    )
                }
                Holder::None => {
                    let (request, mut objects) = self.prepare(&asked).await.map_err(invalid)?;
                    cluster_job::warn(&asked, &request);
                    self.declaration.own(&mut objects);
                    match submit::submit(&self.cluster, &request, objects).await {
                        Ok(waits) => {
                            if let Some(why) = waits {
                                print_warning(&format!("the master waits: {why}"));
                            }
                            self.declaration.outlive_pods().await;
                            return Ok(());
                        }
                        // The objects of a former job are being collected.
                        Err(error @ ClusterError::Exists(_)) => error.to_string(),
                        Err(error) => return Err(error.into()),
                    }
                }
            };
            if Instant::now() >= give_up {
                return Err(End::Passing(Err(Failure::failed(why))));
            }
            sleep(PAUSE).await;
        }
    }

    /// Shows the job until it ends, and carries each change of its options over.
    async fn follow(&self, known: Option<String>) -> End {
        tokio::select! {
            end = self.follow_to_end() => end,
            never = self.follow_options(known) => match never {},
        }
    }

    async fn follow_to_end(&self) -> End {
        loop {
            let followed = backend::follow(&self.cluster, self.name(), FollowOutput::default());
            let failure = match followed.await {
                Ok(EXIT_INTERRUPTED) => return End::Passing(Ok(EXIT_TERMINATED)),
                Ok(EXIT_OK) => return End::Final(Ok(EXIT_OK)),
                Ok(code) => {
                    let text = format!("the job {} has ended with code {code}", self.name());
                    return End::Final(Err(Failure { code, text }));
                }
                Err(failure) => failure,
            };
            let is_gone = matches!(
                self.declaration.holder(self.name()).await,
                Ok(Holder::None | Holder::Other)
            );
            let health = master_pods::inspect(&self.cluster, self.name()).await;
            if is_gone || health.failed.is_some() {
                return End::Final(Err(Failure { code: EXIT_FAILED, ..failure }));
            }
            print_warning(&failure.text);
            sleep(FOLLOW_AGAIN).await;
        }
    }

    async fn follow_options(&self, mut known: Option<String>) -> Infallible {
        let mut watch = self.declaration.watch();
        loop {
            let options = watch.next().await;
            if options != known {
                known.clone_from(&options);
                self.carry_over(options).await;
            }
        }
    }

    /// Lets the job take over what the options ask for, and reports what it can't.
    async fn carry_over(&self, options: Option<String>) {
        let (reason, message) = match self.change(options).await {
            Ok(changed) if changed.is_empty() => return,
            Ok(changed) => ("ChangeRequested", changed.join(", ")),
            Err(failure) => ("OptionsRefused", failure.text),
        };
        print_line(&format!("{reason}: {message}"));
        self.declaration.record(reason, &message).await;
    }

    /// Requests what the options ask for and a running job can change. Returns that.
    async fn change(&self, options: Option<String>) -> Result<Vec<String>, Failure> {
        let anchor = Anchor::new(&self.cluster, self.name()).read().await?;
        let data = anchor.data.unwrap_or_default();
        let task = Task::in_anchor(&data).ok_or_else(|| {
            Failure::failed(
                "another release of elasticdl has submitted the job: nothing is changed",
            )
        })?;
        let spec = &task.job;
        let asked = self.parse(options.clone(), None)?;
        let (request, _) = self.prepare(&asked).await?;
        let num_workers = request.task.job.num_workers;
        spec.check_scale(num_workers).map_err(Failure::usage)?;
        let suspend = asked.job.lifecycle.suspend;
        if suspend {
            backend::check_suspendable(spec)?;
        }
        let changeable = Changeable { num_workers, suspend };
        let changed = self.declaration.request(self.name(), &task, changeable).await?;
        // Limits that follow from the number of workers are those of the submission.
        let asked = self.parse(options, Some(spec.num_workers))?;
        let (_, objects) = self.prepare(&asked).await?;
        let existing = ExistingJob::find(&self.cluster, self.name(), &objects).await?;
        let mut fixed = existing.map(|job| job.differences).unwrap_or_default();
        fixed.retain(|difference| !difference.contains(".policies.starts_suspended "));
        if fixed.is_empty() {
            return Ok(changed);
        }
        Err(Failure::usage(format!(
            "`num-workers` and `suspend` can be changed while the job runs; for other options, \
             delete the Job and apply it again. The job goes on as it is: {}",
            fixed.join("; ")
        )))
    }

    /// Reads options, with this number of workers if one is given.
    fn parse(
        &self,
        options: Option<String>,
        num_workers: Option<u32>,
    ) -> Result<StartRequest, Failure> {
        let origin = format!("the annotation {OPTIONS} of the Job {}", self.name());
        let text = options.ok_or_else(|| {
            Failure::usage(format!("{origin} is missing; it has the options of `--config` files"))
        })?;
        let mut table: Table =
            text.parse().map_err(|error| Failure::usage(format!("{origin}: {error}")))?;
        if let Some((key, instead)) = NOT_DECLARED.iter().find(|(key, _)| table.contains_key(*key))
        {
            return Err(Failure::usage(format!("{origin}: leave out `{key}`: {instead}")));
        }
        table.insert("job-name".into(), Value::String(self.name().into()));
        let image = || Value::String(self.declaration.image.clone());
        table.entry("image").or_insert_with(image);
        if let Some(number) = num_workers {
            table.insert("num-workers".into(), Value::Integer(number.into()));
        }
        (self.read)(&origin, table)
    }

    async fn prepare(&self, asked: &StartRequest) -> Result<(Request, Objects), Failure> {
        let image = asked.job.image.as_ref().expect("`parse` has set it");
        let pods = pod_options(&asked.cluster, image)?;
        cluster_job::prepare(asked, pods, &self.cluster).await
    }
}

/// Options that a declaration does not have, and what takes their place.
const NOT_DECLARED: [(&str, &str); 9] = [
    ("context", "the job runs in the cluster of its Job"),
    ("detach", "the Job follows its job"),
    ("dry-run", "`kubectl apply --dry-run=server` checks the Job"),
    ("if-not-exists", "the Job takes up the job that it has submitted"),
    ("job-name", "the job has the name of its Job"),
    ("local", "the job runs in the cluster of its Job"),
    ("namespace", "the job runs in the namespace of its Job"),
    ("summary", "the summary is in the job's ConfigMap"),
    ("ttl-after-finished", "`ttlSecondsAfterFinished` of the Job deletes the job with it"),
];
/// The host name of a pod's containers is the pod's name.
const HOST_NAME: &str = "/proc/sys/kernel/hostname";
/// Time for the objects of a former job of this name to be collected.
const OTHER_TIMEOUT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_secs(1);
/// Pause after a job could not be followed, for example because its master can't start yet.
const FOLLOW_AGAIN: Duration = Duration::from_secs(15);
