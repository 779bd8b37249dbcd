//! The Job that runs the master.

use elasticdl_proto::LogFormat;
use k8s_openapi::api::batch::v1::{Job, JobSpec as BatchJobSpec};
use k8s_openapi::api::core::v1::{Container, ContainerPort, PodSpec, PodTemplateSpec};

use super::access;
use super::metadata::metadata;
use super::names::{
    BACKOFF_LIMIT, CERTIFICATE, CONTROL, ELASTICDL, KEY, MASTER, MASTER_GRACE, METRICS, POD_IP,
    PORT, TOKEN, master_name,
};
use super::parts::{self, add_volumes};
use super::request::Request;
use super::template;
use crate::kube::options::TemplateError;

/// Builds the Job.
pub(super) fn job(request: &Request) -> Result<Job, TemplateError> {
    let name = &request.task.job.name;
    let pods = &request.pods;
    let port = |name: &str, container_port| ContainerPort {
        container_port,
        name: Some(name.into()),
        ..ContainerPort::default()
    };
    let (mut mounts, mut volumes) =
        (parts::mounts(), parts::volumes(name, &[TOKEN, CERTIFICATE, KEY], TMP_SIZE));
    if request.task.tensorboard_dir.is_some() {
        add_volumes(pods, &mut volumes, &mut mounts);
    }
    let mut env = parts::tracking_environment(pods);
    env.push(parts::field(POD_IP, "status.podIP"));
    env.push(parts::field("POD_NAME", "metadata.name"));
    env.push(parts::field("POD_UID", "metadata.uid"));
    let mut args = vec!["master", "--job-name", name, "--pod", "$(POD_NAME)/$(POD_UID)"];
    let log_format = request.task.job.log_format;
    // A master of an earlier release does not know the option.
    if log_format != LogFormat::default() {
        args.extend(["--log-format", log_format.name()]);
    }
    let container = Container {
        name: MASTER.into(),
        image: Some(pods.master_image.clone()),
        command: Some(vec![ELASTICDL.into()]),
        args: Some(args.into_iter().map(Into::into).collect()),
        env: Some(env),
        ports: Some(vec![port(CONTROL, PORT), port(METRICS, request.task.metrics_port.into())]),
        liveness_probe: Some(parts::liveness(METRICS)),
        readiness_probe: Some(parts::readiness(METRICS)),
        resources: Some(parts::requirements(&pods.master_resources)),
        security_context: Some(parts::locked_down()),
        // Commands that follow the job then show the last lines of its log.
        termination_message_policy: Some("FallbackToLogsOnError".into()),
        volume_mounts: Some(mounts),
        ..Container::default()
    };
    let spec = PodSpec {
        containers: vec![container],
        service_account_name: Some(access::account_name(request)),
        automount_service_account_token: Some(true),
        volumes: Some(volumes),
        // Short: a preempting pod has to wait for it.
        ..parts::pod_spec(pods, MASTER_GRACE)
    };
    let of_user = pods.master_pod_template.as_ref();
    let mut spec = template::merge(spec, of_user, MASTER)?;
    parts::make_readable(&mut spec);
    let mut meta = metadata(request, "", MASTER);
    meta.name = None;
    meta.namespace = None;
    template::mark(&mut meta, of_user);
    parts::refuse_sidecars(&mut meta);
    parts::allow_scale_down(&mut meta);
    if request.task.serve_metrics {
        // Prometheus installations without the operator discover pods by these annotations.
        let scrape = [
            ("prometheus.io/path", "/metrics".into()),
            ("prometheus.io/port", request.task.metrics_port.to_string()),
            ("prometheus.io/scrape", "true".into()),
        ];
        let annotations = meta.annotations.get_or_insert_default();
        for (key, value) in scrape {
            annotations.entry(key.into()).or_insert(value);
        }
    }
    Ok(Job {
        metadata: metadata(request, &master_name(name), MASTER),
        spec: Some(BatchJobSpec {
            backoff_limit: Some(BACKOFF_LIMIT),
            completions: Some(1),
            parallelism: Some(0),
            ttl_seconds_after_finished: pods.ttl_s,
            template: PodTemplateSpec { metadata: Some(meta), spec: Some(spec) },
            ..BatchJobSpec::default()
        }),
        ..Job::default()
    })
}

/// Size of the master's writable volume, in which it stores nothing.
const TMP_SIZE: &str = "64Mi";
