//! Parsers of values. Each error says what would be valid.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{PathBufValueParser, PossibleValue, PossibleValuesParser, TypedValueParser};
use elasticdl_master::job::MAX_WORKERS_PER_POD;
use elasticdl_master::limits::{
    BATCH_RECORDS_MAX, EPOCHS_MAX, PATH_BYTES_MAX, SHARD_RECORDS_MAX, STEPS_MAX, WORKERS_MAX,
};

/// The values of an option: as a user writes it, what it stands for, and its help.
pub(crate) type Choices<T> = &'static [(&'static str, T, &'static str)];

/// A parser of one of `choices`.
pub(crate) fn choice<T>(choices: Choices<T>) -> impl TypedValueParser<Value = T>
where
    T: Copy + Send + Sync + 'static,
{
    let values = choices.iter().map(|(name, _, help)| PossibleValue::new(*name).help(*help));
    PossibleValuesParser::new(values).try_map(|given| {
        let chosen = choices.iter().find(|(name, ..)| *name == given);
        chosen.map(|(_, value, _)| *value).ok_or("it is none of the possible values")
    })
}

/// Parses a job name. Names are parts of file names and of names of Kubernetes objects, which have
/// the strictest rules.
pub(crate) fn parse_job_name(text: &str) -> Result<String, String> {
    let fit = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let wanted = if text.is_empty() {
        "it must not be empty"
    } else if text.len() > JOB_NAME_LEN_MAX {
        "it must have at most 40 characters"
    } else if !text.chars().all(fit) {
        "it may have lower-case letters, digits and `-` only"
    } else if !text.starts_with(|c: char| c.is_ascii_lowercase()) {
        "it must start with a letter"
    } else if text.ends_with('-') {
        "it must end with a letter or digit"
    } else {
        return Ok(text.into());
    };
    Err(format!("{wanted}, for example `mnist-1`"))
}

pub(crate) fn parse_listen(text: &str) -> Result<IpAddr, String> {
    match text.parse::<IpAddr>() {
        Ok(address) if address.is_unspecified() || address.is_multicast() => {
            Err("it must be one address that workers can connect to, for example `192.0.2.7`"
                .into())
        }
        Ok(address) => Ok(address),
        Err(_) if text.contains('%') => Err("addresses with a scope are valid on one link alone; \
                                             use one without `%`, for example `fd00::7`"
            .into()),
        Err(_) => Err("it must be an IP address, for example `127.0.0.1` or `192.0.2.7`".into()),
    }
}

/// Checks the form of a URI or path of files. Workers open it.
pub(crate) fn parse_uri(text: &str) -> Result<String, String> {
    let known = ["s3", "gs", "az", "file"];
    match text.split_once("://") {
        _ if text.is_empty() => Err("it must not be empty".into()),
        _ if text.len() > PATH_BYTES_MAX => {
            Err(format!("it must have at most {PATH_BYTES_MAX} bytes"))
        }
        Some((scheme, _)) if !known.contains(&scheme) => Err(format!(
            "`{scheme}://` is not supported; it must be a path, or s3://, gs:// or az://"
        )),
        None => refuse_one_slash(text).map(|()| text.into()),
        Some(("file", path)) if has_escape(path) => Err(
            "file:// addresses are not decoded; write the path itself, without file:// and codes \
             such as `%20`"
                .into(),
        ),
        Some((scheme, "")) => Err(format!("`{scheme}://` is not followed by a name")),
        _ => Ok(text.into()),
    }
}

/// Whether a URL of this path would have another path.
fn has_escape(path: &str) -> bool {
    let is_code = |rest: &[u8]| rest.len() >= 2 && rest[..2].iter().all(u8::is_ascii_hexdigit);
    path.split('%').skip(1).any(|rest| is_code(rest.as_bytes()))
}

/// Refuses `s3:/bucket/x` and `file:/x`, which would be local folders.
pub(crate) fn refuse_one_slash(text: &str) -> Result<(), String> {
    match text.split_once(":/") {
        Some((scheme, rest))
            if scheme.len() > 1
                && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric())
                && !rest.starts_with('/') =>
        {
            let meant = match scheme {
                "file" => format!("/{rest}"),
                _ => format!("{scheme}://{rest}"),
            };
            Err(format!("did you mean {meant}? For a folder of this name, ./{text}"))
        }
        _ => Ok(()),
    }
}

/// Parses a path of this machine or of a pod, where nothing but a path works.
pub(crate) fn path_parser() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(check_path)
}

fn check_path(path: PathBuf) -> Result<PathBuf, &'static str> {
    match path.to_str() {
        Some(text) if text.contains("://") || refuse_one_slash(text).is_err() => {
            Err("addresses are not supported here; it must be a path")
        }
        _ => Ok(path),
    }
}

pub(crate) fn parse_workers(text: &str) -> Result<u32, String> {
    parse_count(text, "workers", WORKERS_MAX)
}

pub(crate) fn parse_workers_per_pod(text: &str) -> Result<u32, String> {
    parse_count(text, "workers", MAX_WORKERS_PER_POD)
}

pub(crate) fn parse_epochs(text: &str) -> Result<u32, String> {
    parse_count(text, "epochs", EPOCHS_MAX)
}

pub(crate) fn parse_steps(text: &str) -> Result<u64, String> {
    parse_count(text, "steps", STEPS_MAX)
}

pub(crate) fn parse_batch(text: &str) -> Result<u64, String> {
    parse_count(text, "records", BATCH_RECORDS_MAX)
}

pub(crate) fn parse_shard(text: &str) -> Result<u64, String> {
    parse_count(text, "records", SHARD_RECORDS_MAX)
}

pub(crate) fn parse_seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("it must be a whole number from 0 to {}", u64::MAX))
}

/// Parses a port; 0: a free one.
pub(crate) fn parse_port(text: &str) -> Result<u16, String> {
    text.parse().map_err(|_| "it must be a port from 0 (a free one) to 65535".into())
}

pub(crate) fn parse_timeout(text: &str) -> Result<Duration, String> {
    parse_duration(text, TIMEOUT_MIN, "for example `30s` or `2min`, at least 1s and at most 30days")
}

pub(crate) fn parse_interval(text: &str) -> Result<Duration, String> {
    parse_duration(
        text,
        INTERVAL_MIN,
        "for example `500ms` or `2s`, at least 50ms and at most 30days",
    )
}

pub(crate) fn parse_worker_timeout(text: &str) -> Result<Duration, String> {
    parse_duration(
        text,
        WORKER_TIMEOUT_MIN,
        "for example `1s` or `500ms`, at least 100ms and at most 30days",
    )
}

pub(crate) fn parse_memory(text: &str) -> Result<u64, String> {
    let wanted = || "it must be a size, for example `512MiB` or `8GiB`, at least 1MiB".to_owned();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let shift = match unit.strip_suffix('B').unwrap_or(unit) {
        "Mi" => 20,
        "Gi" => 30,
        "Ti" => 40,
        _ => return Err(wanted()),
    };
    let number = number.parse::<u64>().ok().filter(|number| *number > 0).ok_or_else(wanted)?;
    number.checked_mul(1 << shift).ok_or_else(wanted)
}

fn parse_duration(text: &str, min: Duration, wanted: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(duration) if (min..=TIMEOUT_MAX).contains(&duration) => Ok(duration),
        _ => Err(format!("it must be a duration, {wanted}")),
    }
}

fn parse_count<T>(text: &str, what: &str, max: T) -> Result<T, String>
where
    T: FromStr + PartialOrd + From<u8> + std::fmt::Display,
{
    match text.parse::<T>() {
        Ok(count) if count >= T::from(1) && count <= max => Ok(count),
        _ => Err(format!("it must be a whole number of {what}, from 1 to {max}")),
    }
}

/// Shortest interval of `status --watch`; a shorter one would load the master.
const INTERVAL_MIN: Duration = Duration::from_millis(50);
/// Leaves space for the suffixes of Kubernetes objects within the 63 characters of their names.
pub(crate) const JOB_NAME_LEN_MAX: usize = 40;
const TIMEOUT_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
const TIMEOUT_MIN: Duration = Duration::from_secs(1);
const WORKER_TIMEOUT_MIN: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_accepts_only_an_address_that_workers_can_connect_to() {
        for bad in ["0.0.0.0", "::", "224.0.0.1", "localhost", "127.0.0.1:80", ""] {
            assert!(parse_listen(bad).is_err(), "{bad}");
        }
        assert!(parse_listen("fe80::1%eth0").unwrap_err().contains("without `%`"));
    }

    #[test]
    fn memory_has_a_unit() {
        let sizes = [("1MiB", 1 << 20), ("8Gi", 8 << 30), ("2TiB", 2 << 40)];
        assert!(sizes.iter().all(|(text, bytes)| parse_memory(text) == Ok(*bytes)));
        for bad in ["", "8", "0GiB", "8GB", "-1GiB", "1.5GiB", "8 GiB", "99999999999TiB", "1MiBB"] {
            assert!(parse_memory(bad).unwrap_err().contains("`8GiB`"), "{bad}");
        }
    }

    #[test]
    fn where_only_a_path_works_an_address_is_refused() {
        for bad in ["s3://bucket/sum.json", "https://host/x", "file:///a", "s3:/bucket/x"] {
            assert!(check_path(bad.into()).is_err(), "{bad}");
        }
        for good in ["s3:", "a/b.json", "/dev/stdout"] {
            assert_eq!(check_path(good.into()), Ok(good.into()));
        }
    }

    #[test]
    fn a_uri_is_a_path_or_has_a_supported_scheme() {
        for good in ["m.safetensors", "/a/b", "s3://bucket/a", "gs://b/c", "az://c/d", "file:///a"]
        {
            assert_eq!(parse_uri(good).as_deref(), Ok(good));
        }
        let error = parse_uri("s3:/bucket/a").unwrap_err();
        assert!(error.contains("did you mean s3://bucket/a?"), "{error}");
        let error = parse_uri("file:/tmp/a").unwrap_err();
        assert!(error.contains("did you mean /tmp/a?"), "{error}");
        for good in ["./s3:/a", "/s3:/a", "s3:", "a b:/c"] {
            assert_eq!(parse_uri(good).as_deref(), Ok(good));
        }
        for good in ["/a%20b", "s3://b/a%20b", "file:///90%", "file:///a%2", "file:///%é"] {
            assert_eq!(parse_uri(good).as_deref(), Ok(good));
        }
        assert!(parse_uri("file:///a%20b").unwrap_err().contains("write the path itself"));
        for bad in ["", "gs:/a", "http://host/a", "ftp://x", "s3://", &"a".repeat(5000)] {
            assert!(parse_uri(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn job_names_are_valid_for_files_and_kubernetes_objects() {
        for good in ["a", "mnist-1", &"a".repeat(40)] {
            assert_eq!(parse_job_name(good).as_deref(), Ok(good));
        }
        for bad in ["", "A", "a_b", "1a", "a-", "-a", "ä", "a/b", "..", &"a".repeat(41)] {
            assert!(parse_job_name(bad).is_err(), "{bad}");
        }
    }
}
