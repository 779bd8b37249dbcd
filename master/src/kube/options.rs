//! Options of a job's pods, with a parser for each that checks the value.

mod network;
mod secrets;
mod template;

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{
    HostPathVolumeSource, PersistentVolumeClaimVolumeSource, Volume, VolumeMount,
};

pub use self::network::{Destination, MetricsSource, parse_destinations, parse_metrics_source};
pub use self::secrets::{SecretEnv, parse_env_from_secret};
pub(crate) use self::secrets::{has_credential_form, is_credential};
pub use self::template::{PodTemplate, TemplateError};
use super::names::{check_label_key, check_variable};
pub use super::names::{parse_namespace, parse_object_name};
use super::priority_tiers;

/// Options of a job's pods.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodOptions {
    /// Image with the training program.
    pub image: String,
    /// Image with the `elasticdl` command.
    pub master_image: String,
    /// Names of the secrets with which images are pulled.
    pub image_pull_secrets: Vec<String>,
    /// Service account of the master.
    pub service_account: String,
    /// Service account of the workers. `None`: the namespace's default, without any identity.
    pub worker_service_account: Option<String>,
    /// Resources that the master requests.
    pub master_resources: Resources,
    /// Resources that each worker requests.
    pub worker_resources: Resources,
    /// Resources that each table server requests. `None`: as a worker.
    pub table_server_resources: Option<Resources>,
    /// The workers' priority classes by slot.
    pub priority_tiers: priority_tiers::TierChoice,
    /// Additional environment of the workers.
    pub env: Vec<Pair>,
    /// Additional environment of the workers, from Secrets.
    pub env_from_secret: Vec<SecretEnv>,
    /// The workers' volumes.
    pub volumes: Vec<Mounted>,
    /// Whether the cluster assigns the user and group ids of pods.
    pub cluster_assigns_ids: bool,
    /// Whether network policies limit the connections of its pods.
    pub network_policy: bool,
    /// Peers that may read the master's metrics. Without any, metrics are not served.
    pub metrics_from: Vec<MetricsSource>,
    /// Addresses to which workers may connect. `None`: all.
    pub egress_to: Option<Vec<Destination>>,
    /// Ports at which the master may find the API server, if `egress_to` is given.
    pub api_server_ports: Vec<u16>,
    /// Whether the master gets a service account of its own, with rights on its own objects.
    pub per_job_role: bool,
    /// Seconds from the job's end until its deletion.
    pub ttl_s: Option<i32>,
    /// A partial pod that is merged into the master's.
    pub master_pod_template: Option<PodTemplate>,
    /// A partial pod that is merged into those of the workers.
    pub worker_pod_template: Option<PodTemplate>,
}

/// A name and its value.
pub type Pair = (String, String);

/// Amounts by resource: `cpu`, `memory`, `nvidia.com/gpu` and other resources of nodes.
pub type Resources = BTreeMap<String, String>;

/// A volume and its mount in the workers.
#[derive(Clone, Debug, PartialEq)]
pub struct Mounted {
    /// Volume; its name is set later.
    pub volume: Volume,
    /// Mount.
    pub mount: VolumeMount,
}

/// Parses `cpu=1,memory=2Gi,nvidia.com/gpu=1`.
///
/// # Errors
/// A message that names the error, with an example of a valid value.
pub fn parse_resources(text: &str) -> Result<Resources, String> {
    let example = "for example `cpu=1,memory=2Gi` or `cpu=500m,memory=1Gi,nvidia.com/gpu=1`, \
                   with `limits.cpu=2` for a limit";
    let mut resources = Resources::new();
    for (name, amount) in parse_pairs(text).map_err(|e| format!("{e}; {example}"))? {
        let of = name.strip_prefix(LIMITS).unwrap_or(&name);
        check_label_key(of).map_err(|e| format!("resource `{name}`: {e}; {example}"))?;
        let is_native = NATIVE_RESOURCES.contains(&of) || of.starts_with("hugepages-");
        if !is_native && !of.contains('/') {
            return Err(format!(
                "`{of}` is none of {}, and the name of any other resource has a domain; {example}",
                NATIVE_RESOURCES.join(", ")
            ));
        }
        if !is_quantity(&amount) {
            let wanted = "a number, perhaps with a unit (m, k, M, G, Ki, Mi, Gi, …)";
            return Err(format!("{name}: `{amount}` is not {wanted}; {example}"));
        }
        if of == "memory" && is_tiny(&amount) {
            return Err(format!(
                "{name}: `{amount}` is a number of bytes, less than a pod needs to start; did you \
                 mean {}Mi or {0}Gi? {example}",
                amount.trim_end_matches(|c: char| c.is_ascii_alphabetic())
            ));
        }
        if resources.insert(name.clone(), amount).is_some() {
            return Err(format!("{name} is given twice"));
        }
    }
    Ok(resources)
}

/// Resources without a domain in their names, beside `hugepages-SIZE`.
const NATIVE_RESOURCES: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];

/// Prefix of a resource whose amount is a limit instead of a request.
pub(crate) const LIMITS: &str = "limits.";

/// Parses `NAME=VALUE`.
///
/// # Errors
/// A message that names the error, with an example of a valid value.
pub fn parse_env(text: &str) -> Result<Pair, String> {
    let (name, value) = text.split_once('=').ok_or("it must be NAME=VALUE")?;
    check_variable(name)?;
    Ok((name.into(), value.into()))
}

/// Parses volumes in ElasticDL's grammar:
/// `claim_name=c,mount_path=/data;host_path=/d,mount_path=/scratch`.
///
/// # Errors
/// A message that names the error, with an example of a valid value.
pub fn parse_volumes(text: &str) -> Result<Vec<Mounted>, String> {
    text.split(';').map(str::trim).filter(|part| !part.is_empty()).map(parse_volume).collect()
}

fn parse_volume(text: &str) -> Result<Mounted, String> {
    let example = "for example `claim_name=data,mount_path=/data,read_only=true`";
    let pairs = parse_pairs(text).map_err(|e| format!("{e}; {example}"))?;
    let mut fields = BTreeMap::new();
    for (key, value) in pairs {
        if !VOLUME_KEYS.contains(&key.as_str()) {
            return Err(format!("`{key}` is none of {}; {example}", VOLUME_KEYS.join(", ")));
        }
        if value.is_empty() || fields.insert(key.clone(), value).is_some() {
            return Err(format!("{key} is empty or given twice; {example}"));
        }
    }
    let read_only = match fields.remove("read_only").as_deref() {
        None | Some("false") => None,
        Some("true") => Some(true),
        Some(other) => return Err(format!("read_only is `{other}`; it must be true or false")),
    };
    let mount_path =
        fields.remove("mount_path").ok_or_else(|| format!("mount_path is missing; {example}"))?;
    if !mount_path.starts_with('/') {
        return Err(format!("mount_path `{mount_path}` must be absolute"));
    }
    let sub_path = fields.remove("sub_path");
    let host_type = fields.remove("type");
    let mut volume = Volume::default();
    match (fields.remove("claim_name"), fields.remove("host_path")) {
        (Some(claim_name), None) if host_type.is_none() => {
            volume.persistent_volume_claim =
                Some(PersistentVolumeClaimVolumeSource { claim_name, read_only });
        }
        (None, Some(path)) if path.starts_with('/') => {
            volume.host_path = Some(HostPathVolumeSource { path, type_: host_type });
        }
        (None, Some(path)) => return Err(format!("host_path `{path}` must be absolute")),
        (Some(_), None) => return Err(format!("type goes with host_path only; {example}")),
        _ => return Err(format!("it needs either claim_name or host_path; {example}")),
    }
    let mount = VolumeMount { mount_path, sub_path, read_only, ..VolumeMount::default() };
    Ok(Mounted { volume, mount })
}

/// Checks the name of an image, as far as invalid names can be recognized.
///
/// # Errors
/// A message that describes a valid name.
pub fn parse_image(text: &str) -> Result<String, String> {
    let fit = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '\'' | '\\' | '$' | '`');
    if text.is_empty()
        || !text.chars().all(fit)
        || text.starts_with('-')
        || text.ends_with(['/', ':', '@'])
    {
        return Err("it must be an image's name, for example `team/model:1`".into());
    }
    Ok(text.into())
}

/// Parses a duration of whole seconds, of at most a year.
///
/// # Errors
/// A message that describes a valid duration.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    let wanted = "it must be a duration in whole seconds, for example `90s`, `10min` or `2days`, \
                  at most 1 year";
    let duration = humantime::parse_duration(text).map_err(|e| format!("{e}; {wanted}"))?;
    let whole = duration.subsec_nanos() == 0 && duration <= Duration::from_secs(366 * 24 * 3600);
    if whole { Ok(duration) } else { Err(wanted.into()) }
}

fn parse_pairs(text: &str) -> Result<Vec<Pair>, String> {
    text.split(',')
        .map(|part| match part.trim().split_once('=') {
            Some((key, value)) if !key.trim().is_empty() => {
                Ok((key.trim().into(), value.trim().into()))
            }
            _ => Err(format!("`{}` is not KEY=VALUE", part.trim())),
        })
        .collect()
}

/// Returns whether the API server accepts the text as a quantity: a decimal number and a unit.
fn is_quantity(text: &str) -> bool {
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = &text[number.len()..];
    let digits = number.chars().filter(char::is_ascii_digit).count();
    let points = number.chars().filter(|&c| c == '.').count();
    let fits = digits > 0 && points <= 1 && digits + points == number.len();
    fits && ["", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
        .contains(&unit)
}

/// Whether a quantity of memory is so small that its unit was forgotten.
fn is_tiny(amount: &str) -> bool {
    let number = amount.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let bytes = match &amount[number.len()..] {
        "n" | "u" | "m" => 1e-3,
        "" => 1.0,
        "k" | "Ki" => 1e3,
        _ => return false,
    };
    number
        .parse::<f64>()
        .is_ok_and(|number| (f64::MIN_POSITIVE..MEMORY_MIN).contains(&(number * bytes)))
}

/// Container runtimes refuse to start a container with about this much memory, in bytes.
const MEMORY_MIN: f64 = 8e6;
const VOLUME_KEYS: [&str; 6] =
    ["claim_name", "host_path", "mount_path", "read_only", "sub_path", "type"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_names_and_amounts() {
        let parsed = parse_resources("cpu=500m, memory=1.5Gi,nvidia.com/gpu=2").unwrap();
        let expected = [("cpu", "500m"), ("memory", "1.5Gi"), ("nvidia.com/gpu", "2")];
        assert!(parsed.iter().map(|(k, v)| (k.as_str(), v.as_str())).eq(expected));
        for bad in [
            "",
            "cpu",
            "cpu=",
            "cpu=many",
            "cpu=1,cpu=2",
            "=1",
            "cpu=1Kb",
            "cpu=-1",
            "cpu=1..2",
            "c pu=1",
            "cpu=m",
            "cpus=1",
            "limits.gpu=1",
        ] {
            assert!(parse_resources(bad).is_err(), "{bad}");
        }
        let error = parse_resources("cpu=1,limits.memory=100").unwrap_err();
        assert!(error.contains("did you mean 100Mi or 100Gi?"), "{error}");
        for tiny in ["memory=500m", "memory=4000Ki", "memory=0.5"] {
            assert!(parse_resources(tiny).unwrap_err().contains("number of bytes"), "{tiny}");
        }
        for good in [
            "memory=0",
            "memory=64000000",
            "memory=16M",
            "example.com/memory=1",
            "hugepages-2Mi=4Mi",
        ] {
            assert!(parse_resources(good).is_ok(), "{good}");
        }
    }

    #[test]
    fn variables_that_elasticdl_sets_are_refused() {
        assert_eq!(parse_env("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert_eq!(parse_env("A="), Ok(("A".into(), String::new())));
        for bad in ["A", "=b", "1A=b", "A B=c", "ELASTICDL_TOKEN_FILE=/x", "ä=b"] {
            assert!(parse_env(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn volumes_follow_the_grammar() {
        let parsed = parse_volumes(
            "claim_name=c,mount_path=/a,sub_path=s,read_only=true; \
             host_path=/h,type=Directory,mount_path=/b",
        )
        .unwrap();
        let claim = parsed[0].volume.persistent_volume_claim.as_ref().unwrap();
        assert_eq!((claim.claim_name.as_str(), claim.read_only), ("c", Some(true)));
        let mount = &parsed[0].mount;
        assert_eq!(
            (mount.mount_path.as_str(), mount.sub_path.as_deref(), mount.read_only),
            ("/a", Some("s"), Some(true))
        );
        let host = parsed[1].volume.host_path.as_ref().unwrap();
        assert_eq!((host.path.as_str(), host.type_.as_deref()), ("/h", Some("Directory")));
        assert_eq!(parsed[1].mount.read_only, None);
        for bad in [
            "claim_name=c",
            "mount_path=/a",
            "claim_name=c,host_path=/h,mount_path=/a",
            "claim_name=c,mount_path=a",
            "host_path=h,mount_path=/a",
            "claim_name=c,mount_path=/a,colour=red",
            "claim_name=c,mount_path=/a,read_only=maybe",
            "claim_name=c,claim_name=d,mount_path=/a",
            "claim_name=c,type=Directory,mount_path=/a",
        ] {
            assert!(parse_volumes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_and_images_that_no_server_accepts_are_refused() {
        for bad in ["", "A", "a_b", "-a", "a-", &"a".repeat(254)] {
            assert!(parse_object_name(bad).is_err(), "{bad}");
        }
        assert!(parse_object_name("a.b-1").is_ok() && parse_namespace("a.b").is_err());
        assert!(
            parse_namespace(&"a".repeat(64)).is_err() && parse_namespace(&"a".repeat(63)).is_ok()
        );
        for bad in ["", "a b", "a:", "a/", "-a", "a@", "$(x)"] {
            assert!(parse_image(bad).is_err(), "{bad}");
        }
        assert!(parse_image("localhost:5000/a/b:1@sha256:00").is_ok());
        assert_eq!(parse_seconds("2min"), Ok(Duration::from_secs(120)));
        assert!(parse_seconds("1500ms").is_err() && parse_seconds("2years").is_err());
    }
}
