//! `elasticdl declare`: carries out the job that a batch/v1 Job, or a `TrainJob` of Kubeflow,
//! declares, in the pod of the Job.

mod train_job;

use std::convert::Infallible;
use std::time::Duration;

use clap::Args;
use elasticdl_master::job::Scaling;
use elasticdl_master::kube::anchor::{
    Anchor, MAX_WORKERS, MIN_WORKERS, NUM_WORKERS, SUSPEND, WEIGHT,
};
use elasticdl_master::kube::client::{Cluster, ClusterChoice, ClusterError};
use elasticdl_master::kube::declaration::{
    Asked, Declaration, Document, Holder, OPTIONS, Requested,
};
use elasticdl_master::kube::existing::ExistingJob;
use elasticdl_master::kube::objects::{Objects, Request, Task};
use elasticdl_master::kube::{master_pods, scaling, submit};
use elasticdl_proto::Status;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use toml::{Table, Value};

use super::cluster_job::{self, pod_options};
use super::request::{StartRequest, workers_per_pod};
use crate::backend::{self, FollowOutput};
use crate::process::{
    Console, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, Failure, cannot, log_format,
    new_runtime, print_line, print_warning, set_log_format,
};

/// Arguments of `elasticdl declare`.
#[derive(Args, Debug)]
pub(crate) struct DeclareArgs {
    /// Name of the pod. [default: the host name]
    #[arg(long)]
    pod: Option<String>,

    /// Name of the TrainJob to which the Job of the pod belongs. [default: the Job is the
    /// declaration]
    #[arg(long)]
    train_job: Option<String>,
}

/// Submits the declared job, or takes up the one that an earlier pod has submitted, carries changes
/// of the declaration over to it, and shows it until it ends. Returns its exit code.
pub(crate) fn declare(args: DeclareArgs, read: ReadOptions) -> Result<u8, Failure> {
    new_runtime()?.block_on(async {
        let cluster = Cluster::connect(&ClusterChoice::default()).await.map_err(no_config)?;
        let pod = match args.pod {
            Some(pod) => pod,
            None => std::fs::read_to_string(HOST_NAME).map_err(cannot("read the pod's name"))?,
        };
        let declaration =
            Declaration::of_pod(&cluster, pod.trim(), args.train_job.as_deref()).await?;
        let declaration = declaration.ok_or_else(|| {
            Failure::usage(format!(
                "the pod {} belongs to no Job; `elasticdl declare` is the command of the pod of a \
                 Job that has the annotation {OPTIONS}, or of a TrainJob (see manifests/README.md)",
                pod.trim()
            ))
        })?;
        let declared = DeclaredJob { cluster, declaration, read };
        let document = declared.declaration.document().await?;
        let ended = match declared.take_up(&document).await {
            Ok(()) => declared.follow(document).await,
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

fn no_config(error: ClusterError) -> Failure {
    match error {
        ClusterError::NoConfig(why) => Failure::usage(format!(
            "no cluster is configured ({why}); `elasticdl declare` is the command of the pod of a \
             Job or a TrainJob (see manifests/README.md)"
        )),
        error => error.into(),
    }
}

/// A job that a Job or a `TrainJob` declares.
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

impl End {
    fn invalid(failure: Failure) -> Self {
        Self::Final(Err(failure))
    }
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

    /// Ensures that the job exists, and is as the document asks for.
    async fn take_up(&self, document: &Document) -> Result<(), End> {
        let asked = self.parse(document).map_err(End::invalid)?;
        set_log_format(asked.output.log_format);
        let give_up = Instant::now() + OTHER_TIMEOUT;
        let (mut printed, mut recorded) = (None, None);
        let mut pause = PAUSE;
        loop {
            let holder = self.declaration.holder(self.name()).await?;
            let why = match holder {
                Holder::Declaration => {
                    print_line(&format!("the job {} exists already", self.name()));
                    self.declaration.outlive_pods().await;
                    self.carry_over(document).await;
                    return Ok(());
                }
                Holder::CutOff => {
                    submit::delete(&self.cluster, self.name()).await?;
                    continue;
                }
                Holder::None => match self.submit(&asked).await? {
                    None => return Ok(()),
                    Some(taken) => taken,
                },
                Holder::ConfigMap | Holder::Former | Holder::Other => self.taken_by(holder),
            };
            let is_first = printed.replace(why.clone()).as_ref() != Some(&why);
            if is_first {
                print_line(&why);
            }
            // What a former job has left is removed within seconds.
            let may_pass = holder == Holder::Former || (holder == Holder::None && is_first);
            if !may_pass && recorded.as_ref() != Some(&why) {
                self.declaration.record("NameTaken", &why).await;
                recorded = Some(why.clone());
            }
            if Instant::now() >= give_up {
                return Err(End::Passing(Err(Failure::failed(why))));
            }
            sleep(pause).await;
            if holder == Holder::None {
                pause = (2 * pause).min(FOLLOW_AGAIN);
            }
        }
    }

    /// Submits the job. Returns which other object has a name that the job needs, if one has.
    async fn submit(&self, asked: &StartRequest) -> Result<Option<String>, End> {
        let (request, mut objects) = self.prepare(asked).await.map_err(End::invalid)?;
        cluster_job::warn(asked, &request);
        self.declaration.own(&mut objects);
        match submit::submit(&self.cluster, &request, objects).await {
            Ok(waits) => {
                if let Some(why) = waits {
                    print_warning(&format!("the master waits: {why}"));
                }
                self.declaration.outlive_pods().await;
                Ok(None)
            }
            Err(error @ ClusterError::Exists(_)) => Ok(Some(error.to_string())),
            Err(error) => Err(error.into()),
        }
    }

    /// Why the job can't be submitted while its name has this holder.
    fn taken_by(&self, holder: Holder) -> String {
        let (name, namespace) = (self.name(), &self.cluster.namespace);
        match holder {
            Holder::ConfigMap => format!(
                "the namespace {namespace} has a ConfigMap {name}, whose name the job needs: it \
                 goes with the job that it belongs to, or `kubectl delete configmap {name} \
                 --namespace {namespace}` removes it"
            ),
            Holder::Former => format!(
                "waiting until the cluster has removed the objects of the former job {name} in \
                 the namespace {namespace}"
            ),
            _ => format!(
                "the namespace {namespace} has another job {name}, which this {} does not \
                 declare: `elasticdl delete {name} --namespace {namespace}` removes it",
                self.declaration.kind()
            ),
        }
    }

    /// Shows the job until it ends, and carries each change of the document over.
    async fn follow(&self, mut known: Document) -> End {
        let (statuses, told) = watch::channel(None);
        let end = async {
            let end = tokio::select! {
                end = self.follow_to_end(statuses) => end,
                never = self.follow_document(&mut known) => match never {},
            };
            // What suspends the document also ends this pod.
            if let (End::Passing(_), Ok(document)) = (&end, self.declaration.document().await)
                && document != known
            {
                self.carry_over(&document).await;
            }
            end
        };
        tokio::join!(end, self.declaration.report(told, print_warning)).0
    }

    async fn follow_to_end(&self, statuses: watch::Sender<Option<Status>>) -> End {
        loop {
            let console = Console { format: log_format(), ..Console::default() };
            let output = FollowOutput { console, summary: None, statuses: Some(statuses.clone()) };
            let followed = backend::follow(&self.cluster, self.name(), output);
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
                Ok(Holder::ConfigMap | Holder::Former | Holder::None | Holder::Other)
            );
            let health = master_pods::inspect(&self.cluster, self.name()).await;
            if is_gone || health.failed.is_some() {
                return End::Final(Err(Failure { code: EXIT_FAILED, ..failure }));
            }
            print_warning(&failure.text);
            sleep(FOLLOW_AGAIN).await;
        }
    }

    async fn follow_document(&self, known: &mut Document) -> Infallible {
        let mut watch = self.declaration.watch();
        loop {
            let document = watch.next().await;
            if document != *known {
                self.carry_over(&document).await;
                *known = document;
            }
        }
    }

    /// Lets the job take over what the document asks for, and reports what it can't.
    async fn carry_over(&self, document: &Document) {
        let (requested, refused) = match self.change(document).await {
            Ok(changes) => changes,
            Err(failure) => (None, Some(failure.text)),
        };
        for (reason, message) in [("ChangeRequested", requested), ("OptionsRefused", refused)] {
            if let Some(message) = message {
                print_line(&format!("{reason}: {message}"));
                self.declaration.record(reason, &message).await;
            }
        }
    }

    /// Requests what the document asks for and a running job can change. Returns that, and what it
    /// can't change, as texts.
    async fn change(
        &self,
        document: &Document,
    ) -> Result<(Option<String>, Option<String>), Failure> {
        let anchor = Anchor::new(&self.cluster, self.name()).read().await?;
        let data = anchor.data.unwrap_or_default();
        let task = Task::in_anchor(&data).ok_or_else(|| {
            Failure::failed(
                "another release of elasticdl has submitted the job: nothing is changed",
            )
        })?;
        let spec = &task.job;
        let present = scaling::task(&data).map_or(spec.max_workers, |task| task.job.max_workers);
        let asked = self.parse(document)?;
        let (request, objects) = self.prepare(&asked).await?;
        let (job, suspend) = (&request.task.job, asked.job.lifecycle.suspend);
        // A maximum that is not given follows from the number of workers where that needs it.
        let follows = (job.num_workers > present).then_some(job.max_workers);
        let max_workers = asked.workers.max_workers.or(follows);
        let scaling = Scaling { max_workers, ..Scaling::from(job) };
        let suspendable = if suspend { backend::check_suspendable(spec) } else { Ok(()) };
        let suspended = suspendable.map_err(|failure| failure.text);
        let weight = request.task.priority_tiers.as_ref().map(|tiers| tiers.weight);
        let possible = Asked { scaling, weight, suspend: suspended.is_ok().then_some(suspend) };
        let Requested { changed, refused } =
            self.declaration.request(self.name(), &task, possible).await?;
        let existing = ExistingJob::find(&self.cluster, self.name(), &objects).await?;
        let mut fixed = existing.map(|job| job.differences).unwrap_or_default();
        fixed.retain(|differs| !CHANGEABLE.contains(&&*differs.option));
        let fixed = fixed.iter().map(ToString::to_string);
        let refused: Vec<String> =
            refused.into_iter().chain(suspended.err()).chain(fixed).collect();
        let refused = (!refused.is_empty()).then(|| {
            let (last, others) = CHANGEABLE.split_last().expect("there are some");
            format!(
                "`{}` and `{last}` can be changed while the job runs; for other options, delete \
                 the {} and apply it again. The job goes on as it is: {}",
                others.join("`, `"),
                self.declaration.kind(),
                refused.join("; ")
            )
        });
        Ok(((!changed.is_empty()).then(|| changed.join(", ")), refused))
    }

    /// Reads the options of a document.
    fn parse(&self, document: &Document) -> Result<StartRequest, Failure> {
        let (kind, name) = (self.declaration.kind(), self.name());
        let annotation = format!("the annotation {OPTIONS} of the {kind} {name}");
        let image = || Value::String(self.declaration.image.clone());
        let own = document.options.as_deref().map(|text| parse_table(&annotation, text));
        let (origin, mut table) = match (&document.train_job, own.transpose()?) {
            (None, None) => {
                let why = "is missing; it has the options of `--config` files";
                return Err(Failure::usage(format!("{annotation} {why}")));
            }
            (None, Some(own)) => (annotation, own),
            (Some(train_job), own) => {
                let origin = format!("the {kind} {name}");
                let runtime = self.declaration.runtime_options().unwrap_or_default();
                let runtime =
                    parse_table(&format!("{origin}: the options of its runtime"), runtime)?;
                let own = own.unwrap_or_default();
                let per_pod = |mut table: Table| {
                    check_declared(&origin, &table)?;
                    table.entry("image").or_insert_with(image);
                    workers_per_pod(&(self.read)(&origin, table)?.cluster, true)
                };
                let table = train_job::options(&origin, runtime, own, train_job, per_pod)?;
                (origin, table)
            }
        };
        check_declared(&origin, &table)?;
        table.insert("job-name".into(), Value::String(name.into()));
        if document.train_job.is_some() {
            table.entry("master-image").or_insert_with(image);
        }
        table.entry("image").or_insert_with(image);
        if document.suspend {
            table.insert(SUSPEND.into(), true.into());
        }
        (self.read)(&origin, table)
    }

    async fn prepare(&self, asked: &StartRequest) -> Result<(Request, Objects), Failure> {
        let image = asked.job.image.as_ref().expect("`parse` has set it");
        let pods = pod_options(&asked.cluster, image)?;
        cluster_job::prepare(asked, pods, &self.cluster).await
    }
}

fn parse_table(origin: &str, text: &str) -> Result<Table, Failure> {
    text.parse().map_err(|error| Failure::usage(format!("{origin}: {error}")))
}

/// Checks that a declaration has these options.
fn check_declared(origin: &str, table: &Table) -> Result<(), Failure> {
    match NOT_DECLARED.iter().find(|(key, _)| table.contains_key(*key)) {
        Some((key, instead)) => {
            Err(Failure::usage(format!("{origin}: leave out `{key}`: {instead}")))
        }
        None => Ok(()),
    }
}

/// Options that a declaration does not have, and what takes their place.
const NOT_DECLARED: [(&str, &str); 19] = [
    ("context", "the job runs in the cluster of its Job"),
    ("dashboard-port", "`elasticdl dashboard` serves the page of a job in a cluster"),
    ("detach", "the Job follows its job"),
    ("dry-run", "`kubectl apply --dry-run=server` checks the Job"),
    ("host-command", "the workers are pods"),
    ("hosts", "the workers are pods"),
    ("if-not-exists", "the Job takes up the job that it has submitted"),
    ("job-dir", "a job in a cluster has its state in its ConfigMap, and its logs in its pods"),
    ("job-name", "the job has the name of its Job"),
    ("listen", "workers reach the master of a job in a cluster by its Service"),
    ("local", "the job runs in the cluster of its Job"),
    ("namespace", "the job runs in the namespace of its Job"),
    ("per-job-role", "the pod of a Job must not create accounts; `service-account` names one"),
    ("replace", "delete the Job and apply it again"),
    ("replay-step", "a step is computed again on one machine, with `elasticdl train --local`"),
    ("resume", "the next pod of the Job takes the job up"),
    ("summary", "the summary is in the job's ConfigMap"),
    ("tee", "`elasticdl logs` shows what workers print"),
    ("ttl-after-finished", "`ttlSecondsAfterFinished` of the Job deletes the job with it"),
];
/// Options that a job takes over while it runs.
const CHANGEABLE: [&str; 5] = [NUM_WORKERS, MIN_WORKERS, MAX_WORKERS, WEIGHT, SUSPEND];
/// The host name of a pod's containers is the pod's name.
const HOST_NAME: &str = "/proc/sys/kernel/hostname";
/// Time for the objects of a former job of this name to be collected.
const OTHER_TIMEOUT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_secs(1);
/// Pause after a job could not be followed, for example because its master can't start yet.
const FOLLOW_AGAIN: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests;
