//! A job in a cluster: its objects, and their submission.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use elasticdl_master::certificates::{Certificates, YEARS};
use elasticdl_master::job::{JobSpec, Work};
use elasticdl_master::kube::anchor::MAX_WORKERS;
use elasticdl_master::kube::client::{API_SERVER_PORTS, Cluster, ClusterError};
use elasticdl_master::kube::differences::Difference;
use elasticdl_master::kube::existing::ExistingJob;
use elasticdl_master::kube::gang::{GangOptions, GangScheduler};
use elasticdl_master::kube::objects::{self, Credentials, Objects, Request, Task};
use elasticdl_master::kube::options::{Mounted, PodOptions, PodTemplate};
use elasticdl_master::kube::priority_tiers::{PriorityTiers, TierChoice};
use elasticdl_master::kube::{schedulers, submit};
use elasticdl_master::mlflow::Tracking;
use elasticdl_master::token::Token;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::outputs::local;
use super::request::{StartRequest, default_name, nccl_warning};
use crate::args::ClusterOptions;
use crate::backend::{self, FollowOutput};
use crate::process::{
    EXIT_INTERRUPTED, EXIT_OK, Failure, cannot, new_runtime, print, print_line, print_warning,
    read_text,
};

/// Submits a job and follows it. Returns the exit code.
pub(super) fn start(asked: &StartRequest, image: &str) -> Result<u8, Failure> {
    let runtime = new_runtime()?;
    asked.check_summary()?;
    let pods = pod_options(&asked.cluster, image)?;
    let target = &asked.cluster.target;
    if asked.job.dry_run {
        let namespace = match &target.namespace {
            Some(namespace) => namespace.clone(),
            // The namespace of the configured context; no request is sent.
            None => runtime
                .block_on(Cluster::connect(&target.choice()))
                .map_or_else(|_| "default".into(), |cluster| cluster.namespace),
        };
        let request = request(asked, pods, namespace)?;
        let objects =
            Objects::new(&request, draw(&request)?).map_err(|e| Failure::usage(e.to_string()))?;
        return print(&objects.to_yaml());
    }
    runtime.block_on(async {
        let cluster = Cluster::connect(&target.choice()).await?;
        let (request, objects) = prepare(asked, pods, &cluster).await?;
        let name = &request.task.job.name;
        let namespace = &cluster.namespace;
        let if_not_exists = asked.cluster.if_not_exists.then(|| objects.clone());
        if let Some(objects) = &if_not_exists
            && let Some(existing) = ExistingJob::find(&cluster, name, objects).await?
        {
            return Ok(report(&existing, name, namespace, asked));
        }
        warn(asked, &request);
        let mut interrupts = signal(SignalKind::interrupt()).map_err(cannot("handle signals"))?;
        let submitting = submit::submit(&cluster, &request, objects);
        let (submitted, is_interrupted) =
            finish(submitting, &mut interrupts, name, namespace).await?;
        // Another command was faster.
        if let (Err(ClusterError::Exists(_)), Some(objects)) = (&submitted, &if_not_exists)
            && let Some(existing) = ExistingJob::find(&cluster, name, objects).await?
        {
            return Ok(report(&existing, name, namespace, asked));
        }
        if let Some(why) = submitted? {
            print_warning(&format!("the master waits: {why}"));
        }
        if is_interrupted {
            return Ok(backend::detach(name, namespace));
        }
        if asked.job.detach {
            return print(&format!(
                "job {name} is submitted; show its status with \
                 `elasticdl status {name} --namespace {namespace}`\n{}\n",
                credentials_limit()
            ));
        }
        let quiet = asked.output.quiet;
        if !quiet {
            print_line(&format!("job {name} is submitted to the namespace {namespace}"));
            print_line(&credentials_limit());
        }
        let console = asked.output.console();
        let summary = asked.output.summary.clone();
        let output = FollowOutput { console, summary, statuses: None };
        backend::follow(&cluster, name, output).await
    })
}

/// Builds the request of a job and its objects, as this cluster needs them.
pub(super) async fn prepare(
    asked: &StartRequest,
    mut pods: PodOptions,
    cluster: &Cluster,
) -> Result<(Request, Objects), Failure> {
    pods.api_server_ports = cluster.api_server_ports();
    pods.cluster_assigns_ids = cluster.assigns_user_ids().await;
    let mut request = request(asked, pods, cluster.namespace.clone())?;
    if let Some(gang) = &mut request.task.gang {
        schedulers::detect(cluster, gang).await?;
    }
    let objects =
        Objects::new(&request, draw(&request)?).map_err(|e| Failure::usage(e.to_string()))?;
    Ok((request, objects))
}

/// Warns of what users may not expect of a job.
pub(super) fn warn(asked: &StartRequest, request: &Request) {
    let job = &request.task.job;
    if job.options.work.trains() && job.options.checkpoints.is_none() {
        print_warning(
            "no checkpoints are written: if all workers are lost, the trained state is lost too; \
             --checkpoint-dir enables them",
        );
    }
    if let Some(warning) = nccl_warning(&asked.cluster, job) {
        print_warning(&warning);
    }
}

/// Says that a job exists, and how it differs, unless only errors are printed. Returns the exit
/// code.
fn report(existing: &ExistingJob, name: &str, namespace: &str, asked: &StartRequest) -> u8 {
    for line in existence(existing, name, namespace, asked) {
        if !asked.output.quiet {
            print_line(&line);
        }
    }
    EXIT_OK
}

fn existence(
    existing: &ExistingJob,
    name: &str,
    namespace: &str,
    asked: &StartRequest,
) -> Vec<String> {
    let state = existing.ended().unwrap_or_else(|| "not ended".into());
    let first = format!(
        "a job {name} exists already in the namespace {namespace} and has {state}: nothing is \
         submitted"
    );
    let differs = |difference: &Difference| {
        format!("warning: it is not as asked for: {}", difference.on_command_line())
    };
    // A maximum that is not given follows from the number of workers.
    let is_asked = |difference: &&Difference| {
        difference.option != MAX_WORKERS || asked.workers.max_workers.is_some()
    };
    let differences = existing.differences.iter().filter(is_asked).map(differs);
    [first].into_iter().chain(differences).collect()
}

/// Completes the submission of a job: half of its objects would be of no use. Returns its result,
/// and whether the user has interrupted it.
///
/// # Errors
/// The user has interrupted it twice.
async fn finish<T>(
    submission: impl Future<Output = T>,
    interrupts: &mut Signal,
    name: &str,
    namespace: &str,
) -> Result<(T, bool), Failure> {
    let delete = format!("elasticdl delete {name} --namespace {namespace}");
    let mut is_interrupted = false;
    tokio::pin!(submission);
    loop {
        tokio::select! {
            biased;
            result = &mut submission => return Ok((result, is_interrupted)),
            _ = interrupts.recv() => {}
        }
        if std::mem::replace(&mut is_interrupted, true) {
            let text = format!("the job may have been submitted in part; `{delete}` removes it");
            return Err(Failure { code: EXIT_INTERRUPTED, text });
        }
        print_warning(&format!(
            "the submission of the job is completed first; Ctrl-C again ends this command at once, \
             and `{delete}` then removes what there is of the job"
        ));
    }
}

/// What users have to know of the credentials of a job that runs for long.
fn credentials_limit() -> String {
    format!(
        "its token and certificates are valid for {YEARS} years and are not renewed while it runs; \
         another submission (with --resume-from) has new ones"
    )
}

pub(super) fn draw(request: &Request) -> Result<Credentials, Failure> {
    let token = Token::random()
        .map_err(|e| Failure::failed(format!("the system gives no random bytes: {e}")))?;
    let job = &request.task.job.name;
    let certificates =
        Certificates::generate(job, &objects::master_dns_names(job, &request.namespace))
            .map_err(|e| Failure::failed(e.to_string()))?;
    Ok(Credentials { token, certificates })
}

pub(super) fn request(
    asked: &StartRequest,
    pods: PodOptions,
    namespace: String,
) -> Result<Request, Failure> {
    let program: Result<Vec<String>, _> =
        asked.program.iter().map(|word| word.clone().into_string()).collect();
    let program = program.map_err(|word| {
        Failure::usage(format!("{}: in a cluster, PROGRAM and ARGS must be UTF-8", word.display()))
    })?;
    let name = match &asked.job.job_name {
        Some(name) => name.clone(),
        None => default_name(&asked.program)?,
    };
    if program.first().is_none_or(String::is_empty) {
        return Err(Failure::usage(
            "the program's name is empty; give its path in the image after `--`",
        ));
    }
    let priority_tiers = priority_tiers(&asked.cluster, &pods)?;
    let priority_class = core_class(&pods, priority_tiers.as_ref());
    let mounts: Vec<&str> = pods.volumes.iter().map(|v| v.mount.mount_path.as_str()).collect();
    let mut job =
        asked.spec(name, |option, path| path_in_volume(&asked.cluster, &mounts, option, path))?;
    check_outputs(&asked.cluster, &pods.volumes, &job)?;
    if pods.table_server_resources.is_some() && job.options.table_servers == 0 {
        return Err(Failure::usage(
            "--table-server-resources: the job has no table servers; --table-servers N starts them",
        ));
    }
    let core_pods = job.min_workers / job.workers_per_pod;
    let gang = gang(&asked.cluster, core_pods, &pods, priority_class)?;
    job.policies.starts_core_together = gang.is_some();
    check_tracking(&pods)?;
    let task = Task {
        job,
        master_timeout: asked.workers.master_timeout,
        priority_tiers,
        metrics_port: metrics_port(asked.output.metrics_port, &pods)?,
        serve_metrics: !pods.metrics_from.is_empty(),
        tensorboard_dir: tensorboard_dir(asked.output.tensorboard_dir.as_deref(), &pods)?,
        gang,
    };
    Ok(Request { namespace, task, program, pods })
}

/// The workers' priority classes by slot, which a class in the template excludes.
fn priority_tiers(
    options: &ClusterOptions,
    pods: &PodOptions,
) -> Result<Option<PriorityTiers>, Failure> {
    let tiers = match &pods.priority_tiers {
        TierChoice::Auto => Some(PriorityTiers::shipped()),
        TierChoice::Off => None,
        TierChoice::These(tiers) => Some(tiers.clone()),
    };
    if let (Some(class), true) = (worker_class(pods), tiers.is_some()) {
        return Err(Failure::usage(format!(
            "--priority-tiers: --worker-pod-template has the priorityClassName {class} for all \
             workers; remove one of them"
        )));
    }
    if options.weight.is_some() && tiers.is_none() {
        return Err(Failure::usage(
            "--weight: the job has no priority tiers; leave out --priority-tiers off and the \
             priorityClassName of --worker-pod-template, or name the tiers with --priority-tiers",
        ));
    }
    let weight = options.weight.unwrap_or_default();
    Ok(tiers.map(|tiers| PriorityTiers { weight, ..tiers }))
}

/// The priority class that all workers have.
fn worker_class(pods: &PodOptions) -> Option<String> {
    pods.worker_pod_template.as_ref()?.priority_class()
}

/// How the pods are placed together, as the options say.
fn gang(
    options: &ClusterOptions,
    core_pods: u32,
    pods: &PodOptions,
    priority_class: Option<String>,
) -> Result<Option<GangOptions>, Failure> {
    let queue = options.queue.clone();
    let scheduler = options.scheduler;
    match (scheduler, &queue) {
        (Some(GangScheduler::Kueue), None) => {
            return Err(Failure::usage(
                "--scheduler kueue: --queue is missing; it names a LocalQueue of the namespace",
            ));
        }
        (scheduler, Some(queue)) if !scheduler.is_some_and(GangScheduler::has_queues) => {
            let subject = match scheduler {
                Some(scheduler) => format!("--scheduler {} has", scheduler.name()),
                None => "without --scheduler there are".into(),
            };
            return Err(Failure::usage(format!(
                "--queue {queue}: {subject} no queues; volcano and kueue have"
            )));
        }
        _ => {}
    }
    Ok(scheduler.map(|scheduler| {
        let resources = &pods.worker_resources;
        GangOptions::new(scheduler, queue, core_pods, resources, priority_class)
    }))
}

/// Priority class of the core's pods.
fn core_class(pods: &PodOptions, tiers: Option<&PriorityTiers>) -> Option<String> {
    tiers.map(|tiers| tiers.core.clone()).or_else(|| worker_class(pods))
}

fn metrics_port(wanted: Option<u16>, pods: &PodOptions) -> Result<u16, Failure> {
    match wanted {
        Some(0) => {
            Err(Failure::usage("--metrics-port 0: in a cluster it must be a port from 1 to 65535"))
        }
        Some(port) if i32::from(port) == objects::PORT => Err(Failure::usage(format!(
            "--metrics-port {port} is the port on which workers reach the master; choose another"
        ))),
        Some(port) if pods.metrics_from.is_empty() => Err(Failure::usage(format!(
            "--metrics-port {port}: in a cluster, metrics are served to the peers that \
             --metrics-from names, for example `--metrics-from monitoring` (a namespace) or \
             `--metrics-from any`"
        ))),
        wanted => Ok(wanted.unwrap_or(objects::METRICS_PORT)),
    }
}

/// Checks what the master will find in its environment. Values from Secrets are not known here.
fn check_tracking(pods: &PodOptions) -> Result<(), Failure> {
    let variable = |wanted: &str| {
        let (_, value) = pods.env.iter().find(|(name, _)| name == wanted)?;
        Some(value.clone())
    };
    Tracking::read(variable).map(drop).map_err(|error| Failure::usage(format!("--env: {error}")))
}

/// Checks that the folder lies in a volume: the file system of the master ends with its pod.
fn tensorboard_dir(wanted: Option<&Path>, pods: &PodOptions) -> Result<Option<PathBuf>, Failure> {
    let Some(folder) = wanted else { return Ok(None) };
    let inside =
        |m: &&Mounted| m.mount.read_only != Some(true) && folder.starts_with(&m.mount.mount_path);
    match pods.volumes.iter().find(inside) {
        Some(_) => Ok(Some(folder.into())),
        None => Err(Failure::usage(format!(
            "--tensorboard-dir {}: in a cluster it must lie in a --volume that can be written to",
            folder.display()
        ))),
    }
}

pub(super) fn pod_options(options: &ClusterOptions, image: &str) -> Result<PodOptions, Failure> {
    let mut names = BTreeSet::new();
    if let Some((name, _)) = options.env.iter().find(|(name, _)| !names.insert(name)) {
        return Err(Failure::usage(format!("--env {name} is given twice; give it once")));
    }
    let worker = pod_template("--worker-pod-template", options.worker_pod_template.as_ref())?;
    let has_class = worker.as_ref().is_some_and(|worker| worker.priority_class().is_some());
    let usual = if has_class { TierChoice::Off } else { TierChoice::Auto };
    Ok(PodOptions {
        image: image.into(),
        master_image: options.master_image.clone().unwrap_or_else(|| image.into()),
        image_pull_secrets: options.image_pull_secret.clone(),
        service_account: options.service_account.clone(),
        worker_service_account: options.worker_service_account.clone(),
        master_resources: options.master_resources.clone(),
        worker_resources: options.worker_resources.clone(),
        table_server_resources: options.table_server_resources.clone(),
        priority_tiers: options.priority_tiers.clone().unwrap_or(usual),
        env: options.env.clone(),
        env_from_secret: options.env_from_secret.clone(),
        cluster_assigns_ids: false,
        network_policy: !options.no_network_policy,
        metrics_from: options.metrics_from.clone(),
        egress_to: options.egress_to.clone().map(|to| to.0),
        api_server_ports: API_SERVER_PORTS.into(),
        per_job_role: options.per_job_role,
        volumes: options.volume.iter().flat_map(|v| v.0.clone()).collect(),
        ttl_s: options
            .ttl_after_finished
            .map(|ttl| i32::try_from(ttl.as_secs()).expect("it is a year at most")),
        master_pod_template: pod_template(
            "--master-pod-template",
            options.master_pod_template.as_ref(),
        )?,
        worker_pod_template: worker,
    })
}

/// Reads the file that an option names.
fn pod_template(option: &str, file: Option<&PathBuf>) -> Result<Option<PodTemplate>, Failure> {
    let Some(file) = file else { return Ok(None) };
    let origin = format!("{option} {}", file.display());
    let text = read_text(file).map_err(|error| Failure::usage(format!("{origin}: {error}")))?;
    PodTemplate::parse(&origin, &text).map(Some).map_err(|e| Failure::usage(e.to_string()))
}

/// Checks that what the workers write outlives their pods.
fn check_outputs(
    options: &ClusterOptions,
    volumes: &[Mounted],
    job: &JobSpec,
) -> Result<(), Failure> {
    let (export, predictions) = match &job.options.work {
        Work::Evaluate { .. } => (None, None),
        Work::Predict { output, .. } => (None, Some(output)),
        Work::Train { export } => (export.as_ref(), None),
    };
    let best =
        job.options.validation.as_ref().and_then(|validation| validation.export_best.as_ref());
    let checkpoints = job.options.checkpoints.as_ref().map(|checkpoints| &checkpoints.dir);
    let outputs = [
        ("--checkpoint-dir", checkpoints),
        ("--export", export),
        ("--export-best", best),
        ("--predictions", predictions),
    ];
    let mounts: Vec<&str> = volumes.iter().map(|v| v.mount.mount_path.as_str()).collect();
    for (option, address) in outputs {
        let Some(path) = address.and_then(|address| local(address)) else { continue };
        path_in_volume(options, &mounts, option, &path.to_string_lossy())?;
        let around = volumes.iter().filter(|volume| path.starts_with(&volume.mount.mount_path));
        let inmost = around.max_by_key(|volume| volume.mount.mount_path.len());
        if inmost.is_some_and(|volume| volume.mount.read_only == Some(true)) {
            return Err(Failure::usage(format!(
                "{option} {}: its --volume is read_only; choose a folder in a --volume that can \
                 be written to, or in a bucket (s3://, gs://, az://)",
                path.display()
            )));
        }
    }
    Ok(())
}

/// Checks that a path of a job in a cluster lies in a volume of the workers.
fn path_in_volume(
    options: &ClusterOptions,
    mounts: &[&str],
    option: &str,
    path: &str,
) -> Result<String, Failure> {
    let mounted = mounts.iter().any(|mount| Path::new(path).starts_with(mount));
    // A pod template may mount more volumes.
    if mounted || (Path::new(path).is_absolute() && options.worker_pod_template.is_some()) {
        return Ok(path.to_owned());
    }
    Err(Failure::usage(format!(
        "{option} {path}: in a cluster it must be in a folder that all workers share: below the \
         mount_path of a --volume, or in a bucket (s3://, gs://, az://)"
    )))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use elasticdl_master::kube::anchor::{Data, SUMMARY};
    use rustix::process::{Signal as Number, getpid, kill_process};

    use super::*;
    use crate::commands::parse_start;

    #[tokio::test]
    async fn a_submission_is_completed_unless_the_user_interrupts_it_twice() {
        let mut interrupts = signal(SignalKind::interrupt()).unwrap();
        let (done, is_done) = tokio::sync::oneshot::channel();
        let interrupt = || kill_process(getpid(), Number::INT).unwrap();
        interrupt();
        tokio::spawn(async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            done.send(7).unwrap();
        });
        let finished = finish(is_done, &mut interrupts, "j", "n").await.map_err(|e| e.text);
        assert_eq!(finished, Ok((Ok(7), true)));
        let finished = finish(async { 7 }, &mut interrupts, "j", "n").await.map_err(|e| e.text);
        assert_eq!(finished, Ok((7, false)));
        let interrupting = tokio::spawn(async move {
            loop {
                interrupt();
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        let stuck = finish(std::future::pending::<()>(), &mut interrupts, "j", "n").await;
        assert!(stuck.unwrap_err().text.contains("`elasticdl delete j --namespace n`"));
        interrupting.abort();
    }

    #[test]
    fn a_job_without_a_summary_has_not_ended_and_each_difference_is_a_warning() {
        let values = Some(("0".into(), "7".into()));
        let differences = ["max-workers", "seed"]
            .map(|option| Difference { option: option.into(), values: values.clone() });
        let mut existing = ExistingJob { data: Data::default(), differences: differences.to_vec() };
        let asked = |options| {
            parse_start(&format!("train --local --training-data d {options} -- true")).unwrap()
        };
        let lines = existence(&existing, "j", "n", &asked("--max-workers 7"));
        let expected = [
            "a job j exists already in the namespace n and has not ended: nothing is submitted",
            "warning: it is not as asked for: --max-workers is 0, not 7",
            "warning: it is not as asked for: --seed is 0, not 7",
        ];
        assert_eq!(lines, expected);
        let lines = existence(&existing, "j", "n", &asked(""));
        assert_eq!(lines, [expected[0], expected[2]]);
        existing.data.insert(SUMMARY.into(), r#"{"state": "completed"}"#.into());
        let lines = existence(&existing, "j", "n", &asked(""));
        assert!(lines[0].contains("and has completed: "), "{lines:?}");
    }
}
