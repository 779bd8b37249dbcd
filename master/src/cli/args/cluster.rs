//! Options for jobs in a cluster.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Arg, Args, ValueEnum};
use k8s_openapi::api::core::v1::Toleration;

use super::values;
use crate::kube::client::ClusterChoice;
use crate::kube::options::{self, Mounted, Pair, Resources};
use crate::kube::priority_tiers;

/// Options for a job in a cluster.
#[derive(Args, Debug)]
#[command(next_help_heading = HEADING, mut_args(not_with_local))]
pub(crate) struct ClusterOptions {
    /// Image of the master, with the `elasticdl` command. [default: --image]
    #[arg(long, value_name = "IMG", value_parser = options::parse_image, requires = "image")]
    pub(crate) master_image: Option<String>,

    #[command(flatten)]
    pub(crate) target: ClusterTarget,

    /// Service account of the master; see manifests/rbac.yaml.
    #[arg(long, value_name = "NAME", default_value = "elasticdl",
          value_parser = options::parse_object_name,
          requires = "image")]
    pub(crate) service_account: String,

    /// Resource requests of the master, as name=amount,name=amount.
    #[arg(long, value_name = "LIST", default_value = "cpu=100m,memory=128Mi",
          value_parser = options::parse_resources, requires = "image")]
    pub(crate) master_resources: Resources,

    /// Resource requests of each worker pod, e.g. cpu=2,memory=4Gi,nvidia.com/gpu=1.
    ///
    /// Memory and devices are also limits; CPU is not limited.
    #[arg(long, value_name = "LIST", default_value = "cpu=1,memory=1Gi",
          value_parser = options::parse_resources, requires = "image")]
    pub(crate) worker_resources: Resources,

    /// Workers per pod, each a process and a rank of its own. [default: the pod's nvidia.com/gpu,
    /// else 1]
    ///
    /// They share the resources of the pod, and are started, stopped and replaced together. The
    /// numbers of workers must be multiples of it.
    #[arg(long, value_name = "K", value_parser = values::parse_workers_per_pod,
          requires = "image",
          conflicts_with = "local")]
    pub(crate) workers_per_pod: Option<u32>,

    /// Set an environment variable of the workers; can be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = options::parse_env, requires = "image")]
    pub(crate) env: Vec<Pair>,

    /// Pull policy of the images. [default: Always for the tag `latest`, else IfNotPresent]
    #[arg(long, value_name = "POLICY", requires = "image",
          value_parser = PossibleValuesParser::new(["Always", "IfNotPresent", "Never"]))]
    pub(crate) image_pull_policy: Option<String>,

    /// Secret to pull the images with; can be repeated.
    #[arg(long, value_name = "NAME", value_parser = options::parse_object_name, requires = "image")]
    pub(crate) image_pull_secret: Vec<String>,

    /// Labels that nodes must have, as key=value,key=value.
    #[arg(long, value_name = "LABELS", value_parser = options::parse_node_selector,
          requires = "image")]
    pub(crate) node_selector: Option<Labels>,

    /// Node taints to tolerate, as key=value:effect,key:effect,key.
    #[arg(long, value_name = "TAINTS", value_parser = parse_tolerations, requires = "image")]
    pub(crate) tolerations: Option<Tolerations>,

    /// Priority class of the master, and of the workers unless --worker-priority-class is given.
    #[arg(long, value_name = "NAME", value_parser = options::parse_object_name, requires = "image")]
    pub(crate) priority_class: Option<String>,

    /// Priority class of the workers. [default: --priority-class]
    #[arg(long, value_name = "NAME", value_parser = options::parse_object_name, requires = "image")]
    pub(crate) worker_priority_class: Option<String>,

    /// Priority classes of the workers by slot: auto, off, or CORE,TIER,TIER,… from high to low.
    ///
    /// The first --min-workers workers get CORE. Further workers get lower tiers the more workers
    /// the job has, so that jobs share a cluster fairly. auto: the classes of
    /// manifests/priorityclasses.yaml, as far as the cluster has them. [default: off with
    /// --priority-class or --worker-priority-class, else auto]
    #[arg(long, alias = "priority-ladder", value_name = "CLASSES",
          value_parser = priority_tiers::parse, requires = "image",
          conflicts_with = "worker_priority_class")]
    pub(crate) priority_tiers: Option<priority_tiers::TierChoice>,

    /// Scheduler of the pods. [default: the default scheduler of the cluster]
    #[arg(long, value_name = "NAME", value_parser = options::parse_object_name, requires = "image")]
    pub(crate) scheduler_name: Option<String>,

    /// Labels of all objects of the job, as key=value,key=value.
    #[arg(long, value_name = "LABELS", value_parser = options::parse_labels, requires = "image")]
    pub(crate) labels: Option<Labels>,

    /// Annotations of all objects of the job, as key=value,key=value.
    #[arg(long, value_name = "LIST", value_parser = options::parse_annotations, requires = "image")]
    pub(crate) annotations: Option<Labels>,

    /// Delete the job this long after its end (Kubernetes 1.21 or later). [default: keep it]
    #[arg(long, value_name = "DURATION", value_parser = options::parse_seconds, requires = "image")]
    pub(crate) ttl: Option<Duration>,

    /// Terminate the job when it has run for this long. [default: no limit]
    #[arg(long, value_name = "DURATION", value_parser = options::parse_seconds, requires = "image")]
    pub(crate) active_deadline: Option<Duration>,

    /// Volumes of the workers, as claim_name=C,mount_path=/P;host_path=/H,mount_path=/Q.
    ///
    /// Each has either claim_name or host_path (optionally with type), and optionally sub_path and
    /// read_only=true.
    #[arg(long, value_name = "VOLUMES", value_parser = parse_volumes, requires = "image")]
    pub(crate) volume: Vec<Volumes>,

    /// YAML file with a partial pod spec that is merged into the worker pods; the container of the
    /// worker is named `worker`.
    #[arg(long, value_name = "FILE", requires = "image")]
    pub(crate) worker_pod_template: Option<PathBuf>,

    /// Format of --dry-run in a cluster.
    #[arg(long, short, value_name = "FORMAT", default_value = "yaml", requires = "dry_run")]
    pub(crate) output: Format,
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

/// Makes the options for a cluster conflict with `--local`.
fn not_with_local(arg: Arg) -> Arg {
    if arg.get_help_heading() == Some(HEADING) { arg.conflicts_with("local") } else { arg }
}

/// Output format of `--dry-run`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// One document per object.
    Yaml,
}

/// Keys and values.
pub(crate) type Labels = BTreeMap<String, String>;

/// Tolerations of one option value. A newtype, so that clap does not take it for a repeated option.
#[derive(Clone, Debug)]
pub(crate) struct Tolerations(pub(crate) Vec<Toleration>);

/// Volumes of one option value; a newtype as [`Tolerations`] is.
#[derive(Clone, Debug)]
pub(crate) struct Volumes(pub(crate) Vec<Mounted>);

fn parse_tolerations(text: &str) -> Result<Tolerations, String> {
    options::parse_tolerations(text).map(Tolerations)
}

fn parse_volumes(text: &str) -> Result<Volumes, String> {
    options::parse_volumes(text).map(Volumes)
}

const HEADING: &str = "Cluster";
