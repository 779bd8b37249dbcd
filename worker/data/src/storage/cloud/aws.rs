//! Sources of S3's settings: the environment first, then the configuration files of the AWS tools.
//!
//! | setting | environment | files |
//! |---|---|---|
//! | keys | `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` | `~/.aws/credentials`, `~/.aws/config` |
//! | token | `AWS_SESSION_TOKEN` | `~/.aws/credentials`, `~/.aws/config` |
//! | region, endpoint | `AWS_REGION`, `AWS_ENDPOINT` or `AWS_ENDPOINT_URL` | `~/.aws/config` |
//! | profile | `AWS_PROFILE`, else `default` | |
//!
//! `AWS_SHARED_CREDENTIALS_FILE` and `AWS_CONFIG_FILE` select other files. A profile without keys
//! (single sign-on, a role, a command) is refused with instructions. An endpoint that begins with
//! `http://` is used without TLS.

use std::collections::BTreeMap;
use std::path::PathBuf;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};

/// A builder with all settings except the address.
///
/// # Errors
/// The chosen profile does not exist, or has no keys.
pub(super) fn builder() -> Result<AmazonS3Builder, String> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let read = |path: PathBuf| std::fs::read_to_string(path).ok();
    let mut builder = AmazonS3Builder::from_env();
    for (key, value) in settings(variable, read)? {
        builder = builder.with_config(key, value);
    }
    Ok(builder)
}

/// Settings to add to those that the builder reads from the environment.
fn settings(
    variable: impl Fn(&str) -> Option<String>,
    read: impl Fn(PathBuf) -> Option<String>,
) -> Result<Vec<(AmazonS3ConfigKey, String)>, String> {
    let is_signed = variable("AWS_SKIP_SIGNATURE").is_none();
    let given = KEYS.map(|name| variable(name).is_some());
    if given[0] != given[1] && is_signed {
        let [set, missing] = if given[0] { KEYS } else { [KEYS[1], KEYS[0]] };
        return Err(format!("{set} is set and {missing} is not; set both, or none of them"));
    }
    let home = variable("HOME").unwrap_or_default();
    let file = |name: &str, usual: &str| {
        let path = variable(name).unwrap_or_else(|| format!("{home}/.aws/{usual}"));
        read(path.into()).unwrap_or_default()
    };
    let chosen = variable("AWS_PROFILE").or_else(|| variable("AWS_DEFAULT_PROFILE"));
    let name = chosen.clone().unwrap_or_else(|| "default".into());
    let mut profile = section(&file("AWS_CONFIG_FILE", "config"), &name);
    let credentials = section(&file("AWS_SHARED_CREDENTIALS_FILE", "credentials"), &name);
    if let (Some(chosen), None, None) = (&chosen, &profile, &credentials) {
        return Err(format!(
            "AWS_PROFILE is {chosen:?}, and neither ~/.aws/config nor ~/.aws/credentials has such \
             a profile; name one of theirs, or unset it"
        ));
    }
    profile.get_or_insert_default().extend(credentials.unwrap_or_default());
    let profile = profile.unwrap_or_default();
    let mut settings = Vec::new();
    // Credentials from the environment, or those that a cluster provides to a pod, take precedence
    // over those in files.
    let has_keys = CREDENTIALS.iter().any(|name| variable(name).is_some());
    if !has_keys {
        let keys = [
            (AmazonS3ConfigKey::AccessKeyId, "aws_access_key_id"),
            (AmazonS3ConfigKey::SecretAccessKey, "aws_secret_access_key"),
            (AmazonS3ConfigKey::Token, "aws_session_token"),
        ];
        let found =
            keys.into_iter().filter_map(|(key, name)| Some((key, profile.get(name)?.clone())));
        settings.extend(found);
        let other = UNSUPPORTED_CREDENTIALS.iter().find(|name| profile.contains_key(**name));
        if let (true, Some(other)) = (settings.is_empty(), other) {
            return Err(format!(
                "the AWS profile {name:?} has no keys but {other}, which is not supported; set \
                 the variables that `aws configure export-credentials --profile {name} --format \
                 env` prints"
            ));
        }
    }
    let region = ["AWS_REGION", "AWS_DEFAULT_REGION"].iter().any(|name| variable(name).is_some());
    settings.extend(
        profile.get("region").filter(|_| !region).map(|r| (AmazonS3ConfigKey::Region, r.clone())),
    );
    let endpoint = ENDPOINTS.iter().find_map(|name| Some((*name, variable(name)?)));
    if let Some((name, url)) = &endpoint
        && !["http://", "https://"].iter().any(|scheme| url.starts_with(scheme))
    {
        return Err(format!("{name} is {url:?}; it must begin with http:// or https://"));
    }
    let endpoint = endpoint.map(|(_, url)| url);
    let from_profile = endpoint.is_none().then(|| profile.get("endpoint_url").cloned()).flatten();
    settings.extend(from_profile.clone().map(|url| (AmazonS3ConfigKey::Endpoint, url)));
    if endpoint.or(from_profile).is_some_and(|url| url.starts_with("http://")) {
        settings.push((
            AmazonS3ConfigKey::Client(object_store::ClientConfigKey::AllowHttp),
            "true".into(),
        ));
    }
    Ok(settings)
}

/// The profile's section in a configuration file of the AWS tools; `None` if there is none of that
/// name.
fn section(text: &str, profile: &str) -> Option<BTreeMap<String, String>> {
    let mut found: Option<BTreeMap<String, String>> = None;
    let mut is_ours = false;
    for line in text.lines() {
        let is_nested = line.starts_with([' ', '\t']);
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            let name = name.trim();
            is_ours = name.strip_prefix("profile ").map_or(name, str::trim) == profile;
            if is_ours {
                found.get_or_insert_default();
            }
        } else if let (true, false, Some((name, value))) =
            (is_ours, is_nested, line.split_once('='))
        {
            let value = value.trim().to_owned();
            found.get_or_insert_default().insert(name.trim().to_ascii_lowercase(), value);
        }
    }
    found
}

/// Variables that mean that the environment provides credentials.
const CREDENTIALS: [&str; 6] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
];
/// Variables that are useless without each other.
const KEYS: [&str; 2] = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"];
const ENDPOINTS: [&str; 4] =
    ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_S3_ENDPOINT"];
/// Sources of credentials that only the AWS tools support.
const UNSUPPORTED_CREDENTIALS: [&str; 4] =
    ["credential_process", "role_arn", "sso_session", "sso_start_url"];

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: [(&str, &str); 2] = [
        (
            "/home/me/.aws/credentials",
            "# mine\n[default]\naws_access_key_id = A\naws_secret_access_key=B=\n\n\
             [work]\naws_access_key_id = C\naws_secret_access_key = D\naws_session_token = E\n",
        ),
        (
            "/home/me/.aws/config",
            "[default]\nregion = eu-west-1\ns3 =\n  region = nested\n\
             [profile work]\nendpoint_url = http://minio:9000\n[profile sso]\nsso_session = corp\n",
        ),
    ];

    fn found(variables: &[(&str, &str)]) -> Result<Vec<(String, String)>, String> {
        let variable = |name: &str| match name {
            "HOME" => Some("/home/me".into()),
            _ => variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()),
        };
        let read = |path: PathBuf| {
            FILES
                .iter()
                .find(|(name, _)| path.as_os_str() == *name)
                .map(|(_, text)| (*text).to_owned())
        };
        let settings = settings(variable, read)?;
        Ok(settings.into_iter().map(|(key, value)| (key.as_ref().to_owned(), value)).collect())
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
    }

    #[test]
    fn files_of_the_aws_tools_are_read_for_settings_that_the_environment_lacks() {
        let keys = [
            ("aws_access_key_id", "A"),
            ("aws_secret_access_key", "B="),
            ("aws_region", "eu-west-1"),
        ];
        assert_eq!(found(&[]).unwrap(), pairs(&keys));
        let work = found(&[("AWS_PROFILE", "work")]).unwrap();
        let expected = [
            ("aws_access_key_id", "C"),
            ("aws_secret_access_key", "D"),
            ("aws_session_token", "E"),
            ("aws_endpoint_url", "http://minio:9000"),
            ("allow_http", "true"),
        ];
        assert_eq!(work.len(), expected.len(), "{work:?}");
        assert_eq!(work[..3], pairs(&expected)[..3]);
        assert_eq!((&*work[3].1, &*work[4].1), ("http://minio:9000", "true"));
    }

    #[test]
    fn the_environment_takes_precedence() {
        let set = [("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "y"), ("AWS_REGION", "z")];
        assert_eq!(found(&set).unwrap(), []);
        assert_eq!(
            found(&[("AWS_WEB_IDENTITY_TOKEN_FILE", "f"), ("AWS_REGION", "z")]).unwrap(),
            []
        );
    }

    #[test]
    fn an_http_endpoint_is_used_without_tls() {
        let set = [
            ("AWS_ACCESS_KEY_ID", "x"),
            ("AWS_SECRET_ACCESS_KEY", "y"),
            ("AWS_REGION", "z"),
            ("AWS_ENDPOINT_URL", "http://localhost:9000"),
        ];
        assert_eq!(found(&set).unwrap().last().unwrap().1, "true");
        let error = found(&[("AWS_ENDPOINT", "localhost:9000")]).unwrap_err();
        assert_eq!(
            error,
            "AWS_ENDPOINT is \"localhost:9000\"; it must begin with http:// or https://"
        );
    }

    #[test]
    fn half_of_the_keys_is_refused_with_the_missing_variable() {
        for (set, missing) in [KEYS, [KEYS[1], KEYS[0]]].map(|[set, missing]| (set, missing)) {
            let error = found(&[(set, "x")]).unwrap_err();
            assert!(error.starts_with(&format!("{set} is set and {missing} is not")), "{error}");
            assert!(found(&[(set, "x"), ("AWS_SKIP_SIGNATURE", "true")]).is_ok());
        }
    }

    #[test]
    fn a_profile_without_keys_is_refused_with_instructions() {
        let error = found(&[("AWS_PROFILE", "none")]).unwrap_err();
        assert!(error.contains("neither ~/.aws/config nor ~/.aws/credentials"), "{error}");
        let error = found(&[("AWS_PROFILE", "sso")]).unwrap_err();
        assert!(error.contains("export-credentials --profile sso"), "{error}");
    }
}
