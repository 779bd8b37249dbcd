//! A job in a cluster: its objects, and their submission.

use std::path::{Path, PathBuf};

use super::request::{StartRequest, default_name};
use crate::cli::args::ClusterOptions;
use crate::cli::backend::{self, FollowOutput};
use crate::cli::process::{Failure, new_runtime, print, print_line, print_warning};
use crate::kube::certificates::Certificates;
use crate::kube::client::Cluster;
use crate::kube::objects::{self, Credentials, Objects, Request, Task};
use crate::kube::options::{Mounted, PodOptions, parse_pod_template};
use crate::kube::priority_tiers::{PriorityTiers, TierChoice};
use crate::kube::submit;
use crate::token::Token;

/// Submits a job and follows it. Returns the exit code.
pub(super) fn start(asked: &StartRequest, image: &str) -> Result<u8, Failure> {
    let runtime = new_runtime()?;
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
        let request = request(asked, pods, cluster.namespace.clone())?;
        let objects =
            Objects::new(&request, draw(&request)?).map_err(|e| Failure::usage(e.to_string()))?;
        let job = &request.task.job;
        if job.work.trains() && job.checkpoints.is_none() {
            print_warning(
                "no checkpoints are written: if all workers are lost, the trained state is lost \
                 too; --checkpoint-dir enables them",
            );
        }
        submit::submit(&cluster, &request, objects).await?;
        let name = &request.task.job.name;
        let namespace = &cluster.namespace;
        if asked.job.detach {
            return print(&format!(
                "job {name} is submitted; show its status with \
                 `elasticdl status {name} --namespace {namespace}`\n"
            ));
        }
        let quiet = asked.output.quiet;
        if !quiet {
            print_line(&format!("job {name} is submitted to the namespace {namespace}"));
        }
        let output = FollowOutput { quiet, summary: asked.output.summary.clone() };
        backend::follow(&cluster, name, output).await
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

fn request(asked: &StartRequest, pods: PodOptions, namespace: String) -> Result<Request, Failure> {
    let program: Result<Vec<String>, _> =
        asked.program.iter().map(|word| word.clone().into_string()).collect();
    let program = program.map_err(|word| {
        Failure::usage(format!("{}: in a cluster, PROGRAM and ARGS must be UTF-8", word.display()))
    })?;
    let name = match &asked.job.job_name {
        Some(name) => name.clone(),
        None => default_name(Path::new(program.first().map_or("", String::as_str)))?,
    };
    if program.first().is_none_or(String::is_empty) {
        return Err(Failure::usage(
            "the program's name is empty; give its path in the image after `--`",
        ));
    }
    let priority_tiers = match &pods.priority_tiers {
        TierChoice::Auto => Some(PriorityTiers::shipped()),
        TierChoice::Off => None,
        TierChoice::These(tiers) => Some(tiers.clone()),
    };
    let mounts: Vec<&str> = pods.volumes.iter().map(|v| v.mount.mount_path.as_str()).collect();
    let task = Task {
        job: asked
            .spec(name, |option, path| path_in_volume(&asked.cluster, &mounts, option, path))?,
        master_timeout: asked.workers.master_timeout,
        priority_tiers,
        metrics_port: metrics_port(asked.output.metrics_port)?,
        tensorboard_dir: tensorboard_dir(asked.output.tensorboard_dir.as_deref(), &pods)?,
    };
    Ok(Request { namespace, task, program, pods })
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

fn pod_options(options: &ClusterOptions, image: &str) -> Result<PodOptions, Failure> {
    let template = options.worker_pod_template.as_ref().map(|path| {
        let text = std::fs::read_to_string(path).map_err(|e| e.to_string());
        text.and_then(|text| parse_pod_template(&text))
            .map_err(|e| Failure::usage(format!("--worker-pod-template {}: {e}", path.display())))
    });
    let template = template.transpose()?;
    let classes = [&options.priority_class, &options.worker_priority_class];
    let has_class = classes.iter().any(|class| class.is_some())
        || template.as_ref().is_some_and(|spec| spec.get("priorityClassName").is_some());
    let usual = if has_class { TierChoice::Off } else { TierChoice::Auto };
    Ok(PodOptions {
        image: image.into(),
        master_image: options.master_image.clone().unwrap_or_else(|| image.into()),
        image_pull_policy: options.image_pull_policy.clone(),
        image_pull_secrets: options.image_pull_secret.clone(),
        service_account: options.service_account.clone(),
        master_resources: options.master_resources.clone(),
        worker_resources: options.worker_resources.clone(),
        priority_class: options.priority_class.clone(),
        worker_priority_class: options
            .worker_priority_class
            .clone()
            .or_else(|| options.priority_class.clone()),
        priority_tiers: options.priority_tiers.clone().unwrap_or(usual),
        scheduler_name: options.scheduler_name.clone(),
        env: options.env.clone(),
        node_selector: options.node_selector.clone().unwrap_or_default(),
        tolerations: options.tolerations.clone().map(|t| t.0).unwrap_or_default(),
        labels: options.labels.clone().unwrap_or_default(),
        annotations: options.annotations.clone().unwrap_or_default(),
        volumes: options.volume.iter().flat_map(|v| v.0.clone()).collect(),
        ttl_s: options.ttl.map(|ttl| i32::try_from(ttl.as_secs()).expect("it is a year at most")),
        active_deadline_s: options
            .active_deadline
            .map(|d| i64::try_from(d.as_secs()).expect("a year at most")),
        worker_pod_template: template,
    })
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
