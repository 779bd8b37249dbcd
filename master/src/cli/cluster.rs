//! `elasticdl train --image`: a job in a cluster.

use std::collections::BTreeMap;
use std::io::{Write as _, stdout};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Arg, Args, ValueEnum};
use k8s_openapi::api::core::v1::Toleration;

use super::checkpoint::path_in_volume;
use super::train::TrainArgs;
use super::{EXIT_OK, Failure, follow, job_options};
use crate::job::MAX_WORKERS_PER_POD;
use crate::kube::certificates::Certificates;
use crate::kube::client::{Cluster, ClusterChoice, ClusterError};
use crate::kube::objects::{self, Credentials, Objects, Request, Task};
use crate::kube::options::{self, Mounted, Pair, PodOptions, Resources};
use crate::kube::priority_tiers::{self, PriorityTiers};
use crate::kube::submit;
use crate::token::Token;

/// Arguments of `elasticdl train` for a job in a cluster.
#[derive(Args, Debug)]
#[command(next_help_heading = HEADING)]
pub struct ClusterArgs {
    /// Run the master and the workers as pods of this image.
    ///
    /// The image contains PROGRAM and, unless --master-image is given, the `elasticdl` command,
    /// both in its $PATH.
    #[arg(long, value_name = "IMG", value_parser = options::parse_image,
          conflicts_with_all = ["local", "job_dir", "listen"])]
    pub image: Option<String>,

    /// Image of the master, with the `elasticdl` command. [default: --image]
    #[arg(long, value_name = "IMG", value_parser = options::parse_image, requires = "image")]
    pub master_image: Option<String>,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub target: ClusterTarget,

    /// Service account of the master; see manifests/rbac.yaml.
    #[arg(long, value_name = "NAME", default_value = "elasticdl",
          value_parser = options::parse_object_name,
          requires = "image")]
    pub service_account: String,

    /// Resource requests of the master, as name=amount,name=amount.
    #[arg(long, value_name = "LIST", default_value = "cpu=100m,memory=128Mi",
          value_parser = options::parse_resources, requires = "image")]
    pub master_resources: Resources,

    /// Resource requests of each worker pod, e.g. cpu=2,memory=4Gi,nvidia.com/gpu=1.
    ///
    /// Memory and devices are also limits; CPU is not limited.
    #[arg(long, value_name = "LIST", default_value = "cpu=1,memory=1Gi",
          value_parser = options::parse_resources, requires = "image")]
    pub worker_resources: Resources,

    /// Workers per pod, each a process and a rank of its own. [default: the pod's nvidia.com/gpu,
    /// else 1]
    ///
    /// They share the resources of the pod, and are started, stopped and replaced together. The
    /// numbers of workers must be multiples of it.
    #[arg(long, value_name = "K", value_parser = job_options::parse_workers_per_pod,
          requires = "image",
          conflicts_with = "local")]
    pub workers_per_pod: Option<u32>,

    /// Set an environment variable of the workers; can be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = options::parse_env, requires = "image")]
    pub env: Vec<Pair>,

    /// Pull policy of the images. [default: Always for the tag `latest`, else IfNotPresent]
    #[arg(long, value_name = "POLICY", requires = "image",
          value_parser = PossibleValuesParser::new(["Always", "IfNotPresent", "Never"]))]
    pub image_pull_policy: Option<String>,

    /// Secret to pull the images with; can be repeated.
    #[arg(long, value_name = "NAME", value_parser = options::parse_object_name, requires = "image")]
    pub image_pull_secret: Vec<String>,

    /// Labels that nodes must have, as key=value,key=value.
    #[arg(long, value_name = "LABELS", value_parser = options::parse_node_selector,
          requires = "image")]
    pub node_selector: Option<Labels>,

    /// Node taints to tolerate, as key=value:effect,key:effect,key.
    #[arg(long, value_name = "TAINTS", value_parser = parse_tolerations, requires = "image")]
    pub tolerations: Option<Tolerations>,

    /// Priority class of the master, and of the workers unless --worker-priority-class is given.
    #[arg(long, value_name = "NAME", value_parser = options::parse_object_name, requires = "image")]
    pub priority_class: Option<String>,

    /// Priority class of the workers. [default: --priority-class]
    #[arg(long, value_name = "NAME", value_parser = options::parse_object_name, requires = "image")]
    pub worker_priority_class: Option<String>,

    /// Priority classes of the workers by slot: auto, off, or CORE,TIER,TIER,… from high to low.
    ///
    /// The first --min-workers workers get CORE. Further workers get lower tiers the more workers
    /// the job has, so that jobs share a cluster fairly. auto: the classes of
    /// manifests/priorityclasses.yaml, as far as the cluster has them. [default: off with
    /// --priority-class or --worker-priority-class, else auto]
    #[arg(long, alias = "priority-ladder", value_name = "CLASSES",
          value_parser = priority_tiers::parse, requires = "image",
          conflicts_with = "worker_priority_class")]
    pub priority_tiers: Option<priority_tiers::TierChoice>,

    /// Scheduler of the pods. [default: the default scheduler of the cluster]
    #[arg(long, value_name = "NAME", value_parser = options::parse_object_name, requires = "image")]
    pub scheduler_name: Option<String>,

    /// Labels of all objects of the job, as key=value,key=value.
    #[arg(long, value_name = "LABELS", value_parser = options::parse_labels, requires = "image")]
    pub labels: Option<Labels>,

    /// Annotations of all objects of the job, as key=value,key=value.
    #[arg(long, value_name = "LIST", value_parser = options::parse_annotations, requires = "image")]
    pub annotations: Option<Labels>,

    /// Delete the job this long after its end (Kubernetes 1.21 or later). [default: keep it]
    #[arg(long, value_name = "DURATION", value_parser = options::parse_seconds, requires = "image")]
    pub ttl: Option<Duration>,

    /// Terminate the job when it has run for this long. [default: no limit]
    #[arg(long, value_name = "DURATION", value_parser = options::parse_seconds, requires = "image")]
    pub active_deadline: Option<Duration>,

    /// Volumes of the workers, as claim_name=C,mount_path=/P;host_path=/H,mount_path=/Q.
    ///
    /// Each has either claim_name or host_path (optionally with type), and optionally sub_path and
    /// read_only=true.
    #[arg(long, value_name = "VOLUMES", value_parser = parse_volumes, requires = "image")]
    pub volume: Vec<Volumes>,

    /// YAML file with a partial pod spec that is merged into the worker pods; the container of the
    /// worker is named `worker`.
    #[arg(long, value_name = "FILE", requires = "image")]
    pub worker_pod_template: Option<PathBuf>,

    /// Start the job and return; with --local the master continues in the background.
    ///
    /// `elasticdl status NAME` shows the job, and `elasticdl stop NAME` stops it.
    #[arg(long)]
    pub detach: bool,

    /// Print what would be started, without starting it: in a cluster, the objects that would be
    /// created.
    #[arg(long, conflicts_with_all = ["detach", "resume"])]
    pub dry_run: bool,

    /// Format of --dry-run in a cluster.
    #[arg(long, short, value_name = "FORMAT", default_value = "yaml", requires = "dry_run")]
    pub output: Format,
}

/// Selects a cluster and a namespace.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = HEADING)]
pub struct ClusterTarget {
    /// Namespace of the job. [default: that of the context]
    #[arg(long, short, value_name = "NAME", value_parser = options::parse_namespace)]
    pub namespace: Option<String>,

    /// Context of the kubeconfig. [default: the current context]
    ///
    /// The kubeconfig is $KUBECONFIG or ~/.kube/config; in a pod, its service account is used.
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
}

impl ClusterTarget {
    /// Whether an option selects a cluster, so that no job of this machine is meant.
    pub(super) fn is_given(&self) -> bool {
        self.namespace.is_some() || self.context.is_some()
    }

    pub(super) fn choice(&self) -> ClusterChoice {
        ClusterChoice { context: self.context.clone(), namespace: self.namespace.clone() }
    }
}

/// Makes the options of clusters conflict with `--local` and `--resume`.
pub(super) fn conflicting_with_local(arg: Arg) -> Arg {
    let is_for_both = ["image", "detach", "dry_run"].contains(&arg.get_id().as_str());
    match arg.get_help_heading() {
        Some(HEADING) if !is_for_both => arg.conflicts_with_all(["local", "resume"]),
        _ => arg,
    }
}

/// Output format of `--dry-run`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// One document per object.
    Yaml,
}

/// Keys and values.
pub type Labels = BTreeMap<String, String>;

/// Tolerations of one option value. A newtype, so that clap does not take it for a repeated option.
#[derive(Clone, Debug)]
pub struct Tolerations(Vec<Toleration>);

/// Volumes of one option value; a newtype as [`Tolerations`] is.
#[derive(Clone, Debug)]
pub struct Volumes(Vec<Mounted>);

fn parse_tolerations(text: &str) -> Result<Tolerations, String> {
    options::parse_tolerations(text).map(Tolerations)
}

fn parse_volumes(text: &str) -> Result<Volumes, String> {
    options::parse_volumes(text).map(Volumes)
}

/// Submits a job and follows it. Returns the exit code.
pub(super) fn train(args: &TrainArgs, image: &str) -> Result<u8, Failure> {
    let runtime = super::new_runtime()?;
    let pods = pod_options(&args.cluster, image)?;
    let target = args.cluster.target.clone();
    if args.cluster.dry_run {
        let namespace = match target.namespace {
            Some(namespace) => namespace,
            // The namespace of the configured context; no request is sent.
            None => runtime
                .block_on(Cluster::connect(&target.choice()))
                .map_or_else(|_| "default".into(), |cluster| cluster.namespace),
        };
        let request = request(args, pods, namespace)?;
        let objects = Objects::new(&request, draw(&request)?).map_err(to_usage)?;
        return print(&objects.to_yaml());
    }
    runtime.block_on(async {
        let cluster = Cluster::connect(&target.choice()).await.map_err(to_failure)?;
        let request = request(args, pods, cluster.namespace.clone())?;
        let objects = Objects::new(&request, draw(&request)?).map_err(to_usage)?;
        let job = &request.task.job;
        if job.work.trains() && job.checkpoints.is_none() {
            super::print_warning(
                "no checkpoints are written: if all workers are lost, the trained state is lost \
                 too; --checkpoint-dir enables them",
            );
        }
        submit::submit(&cluster, &request, objects).await.map_err(to_failure)?;
        let name = &request.task.job.name;
        let namespace = &cluster.namespace;
        if args.cluster.detach {
            return print(&format!(
                "job {name} is submitted; show its status with \
                 `elasticdl status {name} --namespace {namespace}`\n"
            ));
        }
        if !args.quiet {
            // Standard error may be closed.
            let text = format!("job {name} is submitted to the namespace {namespace}");
            let _ = writeln!(std::io::stderr(), "{text}");
        }
        let output = follow::OutputMode { quiet: args.quiet, summary: args.summary.clone() };
        follow::follow(&cluster, name, output).await
    })
}

fn draw(request: &Request) -> Result<Credentials, Failure> {
    let token = Token::random()
        .map_err(|e| Failure::failed(format!("the system gives no random bytes: {e}")))?;
    let job = &request.task.job.name;
    let certificates =
        Certificates::generate(job, &objects::master_dns_names(job, &request.namespace))
            .map_err(|e| Failure::failed(e.to_string()))?;
    Ok(Credentials { token, certificates })
}

fn request(args: &TrainArgs, pods: PodOptions, namespace: String) -> Result<Request, Failure> {
    let program: Result<Vec<String>, _> =
        args.program.iter().map(|word| word.clone().into_string()).collect();
    let program = program.map_err(|word| {
        Failure::usage(format!("{}: in a cluster, PROGRAM and ARGS must be UTF-8", word.display()))
    })?;
    let name = match &args.job_name {
        Some(name) => name.clone(),
        None => job_options::default_name(Path::new(program.first().map_or("", String::as_str)))?,
    };
    if program.first().is_none_or(String::is_empty) {
        return Err(Failure::usage(
            "the program's name is empty; give its path in the image after `--`",
        ));
    }
    let priority_tiers = match &pods.priority_tiers {
        priority_tiers::TierChoice::Auto => Some(PriorityTiers::shipped()),
        priority_tiers::TierChoice::Off => None,
        priority_tiers::TierChoice::These(tiers) => Some(tiers.clone()),
    };
    let mounts: Vec<&str> = pods.volumes.iter().map(|v| v.mount.mount_path.as_str()).collect();
    let task = Task {
        job: job_options::job_spec(args, name, |option, path| {
            path_in_volume(args, &mounts, option, path)
        })?,
        master_timeout: args.master_timeout,
        priority_tiers,
        metrics_port: metrics_port(args.metrics_port)?,
        tensorboard_dir: tensorboard_dir(args.tensorboard_dir.as_deref(), &pods)?,
    };
    Ok(Request { namespace, task, program, pods })
}

/// Number of workers per pod, and the option that it follows from.
pub(super) fn workers_per_pod(args: &ClusterArgs) -> Result<(u32, String), Failure> {
    if let Some(workers) = args.workers_per_pod {
        return Ok((workers, format!("--workers-per-pod {workers}")));
    }
    let gpus =
        args.image.as_ref().and_then(|_| args.worker_resources.get(GPUS)?.parse::<u32>().ok());
    let gpus = gpus.unwrap_or(1).max(1);
    if gpus > MAX_WORKERS_PER_POD {
        return Err(Failure::usage(format!(
            "--worker-resources {GPUS}={gpus}: a pod holds one worker for each GPU and at most \
             {MAX_WORKERS_PER_POD}; set the number with --workers-per-pod"
        )));
    }
    Ok((gpus, format!("{GPUS}={gpus}")))
}

fn metrics_port(wanted: Option<u16>) -> Result<u16, Failure> {
    match wanted {
        Some(0) => {
            Err(Failure::usage("--metrics-port 0: in a cluster it must be a port from 1 to 65535"))
        }
        Some(port) if i32::from(port) == objects::PORT => Err(Failure::usage(format!(
            "--metrics-port {port} is the port on which workers reach the master; choose another"
        ))),
        wanted => Ok(wanted.unwrap_or(objects::METRICS_PORT)),
    }
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

fn pod_options(args: &ClusterArgs, image: &str) -> Result<PodOptions, Failure> {
    let template = args.worker_pod_template.as_ref().map(|path| {
        let text = std::fs::read_to_string(path).map_err(|e| e.to_string());
        text.and_then(|text| options::parse_pod_template(&text))
            .map_err(|e| Failure::usage(format!("--worker-pod-template {}: {e}", path.display())))
    });
    let template = template.transpose()?;
    let classes = [&args.priority_class, &args.worker_priority_class];
    let has_class = classes.iter().any(|class| class.is_some())
        || template.as_ref().is_some_and(|spec| spec.get("priorityClassName").is_some());
    let usual =
        if has_class { priority_tiers::TierChoice::Off } else { priority_tiers::TierChoice::Auto };
    Ok(PodOptions {
        image: image.into(),
        master_image: args.master_image.clone().unwrap_or_else(|| image.into()),
        image_pull_policy: args.image_pull_policy.clone(),
        image_pull_secrets: args.image_pull_secret.clone(),
        service_account: args.service_account.clone(),
        master_resources: args.master_resources.clone(),
        worker_resources: args.worker_resources.clone(),
        priority_class: args.priority_class.clone(),
        worker_priority_class: args
            .worker_priority_class
            .clone()
            .or_else(|| args.priority_class.clone()),
        priority_tiers: args.priority_tiers.clone().unwrap_or(usual),
        scheduler_name: args.scheduler_name.clone(),
        env: args.env.clone(),
        node_selector: args.node_selector.clone().unwrap_or_default(),
        tolerations: args.tolerations.clone().map(|t| t.0).unwrap_or_default(),
        labels: args.labels.clone().unwrap_or_default(),
        annotations: args.annotations.clone().unwrap_or_default(),
        volumes: args.volume.iter().flat_map(|v| v.0.clone()).collect(),
        ttl_s: args.ttl.map(|ttl| i32::try_from(ttl.as_secs()).expect("it is a year at most")),
        active_deadline_s: args
            .active_deadline
            .map(|d| i64::try_from(d.as_secs()).expect("a year at most")),
        worker_pod_template: template,
    })
}

/// Converts an error of the cluster to a failure with its exit code.
pub(super) fn to_failure(error: ClusterError) -> Failure {
    match error {
        ClusterError::Exists(_) | ClusterError::NoSuchJob { .. } | ClusterError::NoConfig(_) => {
            Failure::usage(error.to_string())
        }
        error => Failure::failed(error.to_string()),
    }
}

fn to_usage(error: impl std::fmt::Display) -> Failure {
    Failure::usage(error.to_string())
}

fn print(text: &str) -> Result<u8, Failure> {
    stdout()
        .write_all(text.as_bytes())
        .map_err(|e| Failure::failed(format!("can't write the answer: {e}")))?;
    Ok(EXIT_OK)
}

/// Resource name of GPUs, as the NVIDIA device plugin registers it.
const GPUS: &str = "nvidia.com/gpu";
const HEADING: &str = "Cluster";
