//! Options for jobs in a cluster.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Arg, Args};
use elasticdl_master::kube::client::ClusterChoice;
use elasticdl_master::kube::gang::GangScheduler;
use elasticdl_master::kube::options::{
    self, Destination, MetricsSource, Mounted, Pair, Resources, SecretEnv,
};
use elasticdl_master::kube::priority_tiers;

use super::values::{self, Choices};

/// Options for a job in a cluster.
#[derive(Args, Debug)]
#[command(next_help_heading = HEADING, mut_args(not_with_local))]
pub(crate) struct ClusterOptions {
    /// Image of the master, with the `elasticdl` command. [default: --image]
    #[arg(long, value_name = "IMG", value_parser = options::parse_image)]
    pub(crate) master_image: Option<String>,

    #[command(flatten)]
    pub(crate) target: ClusterTarget,

    /// Service account of the master; see manifests/rbac.yaml.
    #[arg(long, value_name = "NAME", default_value = "elasticdl",
          value_parser = options::parse_object_name)]
    pub(crate) service_account: String,

    /// Service account of the workers, for access to storage (workload identity). [default: the
    /// namespace's]
    ///
    /// Its API server token is not mounted into the workers.
    #[arg(long, value_name = "NAME", value_parser = options::parse_object_name)]
    pub(crate) worker_service_account: Option<String>,

    /// Exit with 0 if there is a job of this name already, whether it runs or has ended.
    ///
    /// Its state, and each option in which it differs, are printed.
    #[arg(long, requires = "job_name")]
    pub(crate) if_not_exists: bool,

    /// Create a service account for the master with rights on its own objects, instead of using
    /// --service-account; needs the rights in manifests/rbac-per-job.yaml.
    #[arg(long, conflicts_with = "service_account")]
    pub(crate) per_job_role: bool,

    /// Submit the job without network policies. [default: only the workers of the job connect to
    /// its pods]
    #[arg(long, conflicts_with = "egress_to")]
    pub(crate) no_network_policy: bool,

    /// Serve the master's metrics to these peers: namespaces, addresses (10.0.0.0/8) or `any`,
    /// separated by commas. [default: metrics are not served]
    #[arg(long, value_name = "PEERS", value_parser = options::parse_metrics_source,
          value_delimiter = ',')]
    pub(crate) metrics_from: Vec<MetricsSource>,

    /// Limit connections from the pods: workers can connect to each other, to the master and to
    /// these addresses, as CIDR[:PORT],CIDR[:PORT], or `none`; the master to the API server.
    /// [default: no limit]
    ///
    /// A master that gets variables of MLflow or OpenTelemetry by --env can connect to these
    /// addresses, too.
    #[arg(long, value_name = "LIST", value_parser = parse_destinations)]
    pub(crate) egress_to: Option<Destinations>,

    /// Resource requests of the master, as name=amount,name=amount.
    #[arg(long, value_name = "LIST", default_value = "cpu=100m,memory=128Mi",
          value_parser = options::parse_resources)]
    pub(crate) master_resources: Resources,

    /// Resource requests of each worker pod, e.g. cpu=2,memory=4Gi,nvidia.com/gpu=1.
    ///
    /// Memory and devices are also limits; CPU is not limited.
    #[arg(long, value_name = "LIST", default_value = "cpu=1,memory=1Gi",
          value_parser = options::parse_resources)]
    pub(crate) worker_resources: Resources,

    /// Resource requests of the pod of each table server, as in --worker-resources. [default: those
    /// of a worker]
    #[arg(long, value_name = "LIST", value_parser = options::parse_resources)]
    pub(crate) table_server_resources: Option<Resources>,

    /// Workers per pod, each a separate process and rank. [default: the pod's nvidia.com/gpu, else
    /// 1]
    ///
    /// They share the resources of the pod, and are started, stopped and replaced together. All
    /// numbers of workers must be multiples of K.
    #[arg(long, value_name = "K", value_parser = values::parse_workers_per_pod)]
    pub(crate) workers_per_pod: Option<u32>,

    /// Set an environment variable of workers; can be repeated. Credentials are rejected: see
    /// --env-from-secret.
    #[arg(long, value_name = "NAME=VALUE", value_parser = options::parse_env)]
    pub(crate) env: Vec<Pair>,

    /// Set environment variables of the workers from a Secret of the namespace; can be repeated.
    ///
    /// NAME: all keys of the Secret. NAME:KEY: this key. VARIABLE=NAME:KEY: this key under another
    /// name.
    #[arg(long, value_name = "[VARIABLE=]NAME[:KEY]",
          value_parser = options::parse_env_from_secret)]
    pub(crate) env_from_secret: Vec<SecretEnv>,

    /// Nodes on which no worker is started where another one has capacity, separated by commas.
    ///
    /// A node on which workers had three faults within six hours is avoided, too: they were killed
    /// by the system, did not respond, did not join although others had, computed wrong results
    /// (--audit), their node was lost or could not start them, or a worker that joined has found
    /// its memory far slower than that of most others, or no GPU where all others have one.
    /// `elasticdl status` lists the nodes that are avoided. To exclude nodes, use a nodeAffinity in
    /// --worker-pod-template.
    #[arg(long, value_name = "NODES", value_parser = options::parse_object_name,
          value_delimiter = ',')]
    pub(crate) avoid_hosts: Vec<String>,

    /// Secret for pulling the images; can be repeated.
    #[arg(long, value_name = "NAME", value_parser = options::parse_object_name)]
    pub(crate) image_pull_secret: Vec<String>,

    /// Priority classes of the workers by slot: auto, off, or CORE,TIER,TIER,… from high to low.
    ///
    /// The first --min-workers workers get CORE. The more workers a job has, the lower are the
    /// tiers of additional workers, so jobs share a cluster fairly. auto: the classes of
    /// manifests/priorityclasses.yaml that exist in the cluster. [default: off with
    /// priorityClassName in --worker-pod-template, else auto]
    #[arg(long, value_name = "CLASSES", value_parser = priority_tiers::parse)]
    pub(crate) priority_tiers: Option<priority_tiers::TierChoice>,

    /// Share of the cluster relative to other jobs with priority tiers, from 0.1 to 10. [default:
    /// 1]
    ///
    /// When jobs compete, a job of weight 2 gets twice as many workers as a job of weight 1. For
    /// jobs whose workers request different amounts, weights can equalize the amounts: 1 for
    /// workers of 5 CPUs and 0.5 for workers of 10.
    #[arg(long, value_name = "W", value_parser = priority_tiers::parse_weight)]
    pub(crate) weight: Option<priority_tiers::Weight>,

    /// Place the first --min-workers workers together, and queue them: volcano, kueue or native
    /// (the PodGroups of Kubernetes 1.36 and later). [default: each pod separately]
    ///
    /// Additional workers are placed, preempted and replaced one by one. While the job waits in the
    /// queue, its state is `queued`. The master's pod is not queued. volcano and native need the
    /// rights in manifests/schedulers. For a scheduler that places each pod separately, write
    /// `schedulerName: NAME` in --worker-pod-template.
    #[arg(long, value_name = "NAME", value_parser = values::choice(SCHEDULERS))]
    pub(crate) scheduler: Option<GangScheduler>,

    /// Queue of the workers: a Volcano queue or a Kueue LocalQueue. [default for volcano: its
    /// default queue]
    #[arg(long, value_name = "NAME", value_parser = options::parse_object_name)]
    pub(crate) queue: Option<String>,

    /// Delete the job and all of its objects this long after its end (Kubernetes 1.21 or later).
    /// [default: keep them]
    #[arg(long, value_name = "DURATION", value_parser = options::parse_seconds)]
    pub(crate) ttl_after_finished: Option<Duration>,

    /// Volumes of the workers, as claim_name=C,mount_path=/P;host_path=/H,mount_path=/Q.
    ///
    /// Each volume has either claim_name or host_path (with an optional type), and optionally
    /// sub_path and read_only=true.
    #[arg(long, value_name = "VOLUMES", value_parser = parse_volumes)]
    pub(crate) volume: Vec<Volumes>,

    /// Merge a partial pod, a YAML file, into the worker pods.
    ///
    /// The file has fields of a pod's spec (`nodeSelector`, `tolerations`, …), or `spec` and labels
    /// and annotations in `metadata`. The worker's container is named `worker`. Containers, volumes
    /// and variables are merged by name, and null removes a field. Fields that elasticdl or another
    /// option sets are rejected. manifests/README.md has examples.
    #[arg(long, value_name = "FILE")]
    pub(crate) worker_pod_template: Option<PathBuf>,

    /// Merge a partial pod, as in --worker-pod-template, into the master's pod; its container is
    /// named `master`.
    #[arg(long, value_name = "FILE")]
    pub(crate) master_pod_template: Option<PathBuf>,
}

/// Selects a cluster and a namespace.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = HEADING)]
pub(crate) struct ClusterTarget {
    /// Namespace of the job. [default: that of the context]
    #[arg(long, short, value_name = "NAME", value_parser = options::parse_namespace)]
    pub(crate) namespace: Option<String>,

    /// Context of the kubeconfig. [default: the current context]
    ///
    /// The kubeconfig is $KUBECONFIG or ~/.kube/config; in a pod, its service account is used.
    #[arg(long, value_name = "NAME")]
    pub(crate) context: Option<String>,
}

impl ClusterTarget {
    /// Whether an option selects a cluster, so that no job of this machine is meant.
    pub(crate) fn is_given(&self) -> bool {
        self.namespace.is_some() || self.context.is_some()
    }

    pub(crate) fn choice(&self) -> ClusterChoice {
        ClusterChoice { context: self.context.clone(), namespace: self.namespace.clone() }
    }
}

/// Makes the options for a cluster need `--image` and conflict with `--local`.
fn not_with_local(arg: Arg) -> Arg {
    match arg.get_help_heading() {
        Some(HEADING) => arg.requires("image").conflicts_with("local"),
        _ => arg,
    }
}

/// Volumes of one option value. A newtype, so that clap does not take it for a repeated option.
#[derive(Clone, Debug)]
pub(crate) struct Volumes(pub(crate) Vec<Mounted>);

/// Destinations of one option value; a newtype as [`Volumes`] is.
#[derive(Clone, Debug)]
pub(crate) struct Destinations(pub(crate) Vec<Destination>);

fn parse_destinations(text: &str) -> Result<Destinations, String> {
    options::parse_destinations(text).map(Destinations)
}

fn parse_volumes(text: &str) -> Result<Volumes, String> {
    options::parse_volumes(text).map(Volumes)
}

const HEADING: &str = "Cluster";
/// Values of `--scheduler`.
const SCHEDULERS: Choices<GangScheduler> = &[
    ("kueue", GangScheduler::Kueue, "Queues of Kueue"),
    ("native", GangScheduler::Native, "PodGroups of Kubernetes"),
    ("volcano", GangScheduler::Volcano, "PodGroups and queues of Volcano"),
];
