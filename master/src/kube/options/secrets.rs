//! Variables that come from Secrets, and the recognition of credentials in plain text.
//!
//! The arguments, the environment and the pods of a job are stored in objects that more users can
//! read than Secrets. A credential there is refused. It is recognized by the name of a variable, or
//! by a form that no other value has; random text under a harmless name is not recognized.

/// Variables of the workers that come from a Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretEnv {
    /// Name of the Secret.
    pub secret: String,
    /// A variable, and the key of its value. `None`: each key is a variable of the same name.
    pub variable: Option<(String, String)>,
}

/// Parses `NAME`, `NAME:KEY` or `VARIABLE=NAME:KEY`.
///
/// # Errors
/// A message that names the error, with an example of a valid value.
pub fn parse_env_from_secret(text: &str) -> Result<SecretEnv, String> {
    let example = "for example `bucket`, `bucket:AWS_SECRET_ACCESS_KEY` or \
                   `AWS_SECRET_ACCESS_KEY=bucket:secret-key`";
    let (variable, reference) = match text.split_once('=') {
        Some((variable, reference)) => (Some(variable), reference),
        None => (None, text),
    };
    let (secret, key) = match reference.split_once(':') {
        Some((secret, key)) => (secret, Some(key)),
        None => (reference, None),
    };
    let secret = crate::kube::names::parse_object_name(secret)
        .map_err(|e| format!("the Secret `{secret}`: {e}; {example}"))?;
    let Some(key) = key else {
        return match variable {
            Some(_) => Err(format!("a variable needs the key of its value; {example}")),
            None => Ok(SecretEnv { secret, variable: None }),
        };
    };
    let fit = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if key.is_empty() || key.len() > KEY_LEN_MAX || !key.chars().all(fit) {
        return Err(format!(
            "`{key}` is no key of a Secret: letters, digits, `-`, `_` and `.`; {example}"
        ));
    }
    let variable = variable.unwrap_or(key);
    crate::kube::names::check_variable(variable).map_err(|e| format!("{e}; {example}"))?;
    Ok(SecretEnv { secret, variable: Some((variable.into(), key.into())) })
}

/// Returns whether a variable looks like a credential, by its name or its value.
pub(crate) fn is_credential(name: &str, value: &str) -> bool {
    if has_credential_form(value) {
        return true;
    }
    let name = name.to_ascii_uppercase();
    let words: Vec<&str> = name.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let last = words.last().copied().unwrap_or_default();
    let is_path = value.starts_with(['/', '.', '~']) && PATH_WORDS.contains(&last);
    let is_setting = value.parse::<f64>().is_ok() || ["true", "false"].contains(&value);
    if value.is_empty() || is_path || is_setting || REFERENCE_WORDS.contains(&last) {
        return false;
    }
    let has = |known: &[&str]| words.iter().any(|word| known.contains(word));
    // `PAD_TOKEN=<pad>` and `SORT_KEY=user` are usual in training programs.
    let is_random = value.len() >= RANDOM_LEN_MIN
        && value.contains(|c: char| c.is_ascii_digit())
        && value.contains(|c: char| c.is_ascii_alphabetic())
        && !value.contains(char::is_whitespace);
    has(&SECRET_WORDS) || (has(&KEY_WORDS) && is_random)
}

/// Returns whether a text has the form of a known kind of credential.
pub(crate) fn has_credential_form(text: &str) -> bool {
    let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let mut words = text.split(|c: char| !is_word(c));
    let is_token = |word: &str| {
        TOKENS.iter().any(|&(start, len)| {
            let random = word.strip_prefix(start).unwrap_or_default();
            let is_mixed = random.contains(|c: char| c.is_ascii_digit())
                && random.contains(|c: char| c.is_ascii_uppercase());
            // Not every key has a digit. A name that begins with these letters has lower case ones,
            // or is divided into words.
            let is_whole = match start {
                "AKIA" | "ASIA" => !random.contains(|c: char| c.is_ascii_lowercase()),
                "ghp_" | "gho_" | "ghs_" | "ghu_" | "glpat-" | "hf_" | "npm_" => {
                    random.chars().all(|c| c.is_ascii_alphanumeric())
                }
                _ => false,
            };
            word.len() >= len && (is_mixed || !random.is_empty() && is_whole)
        })
    };
    if words.any(is_token) {
        return true;
    }
    let is_json_token = text.split(|c: char| !is_word(c) && c != '.').any(|word| {
        word.starts_with("eyJ") && word.len() >= JSON_TOKEN_LEN_MIN && word.split('.').count() == 3
    });
    let is_private_key = text.contains("-----BEGIN") && text.contains("PRIVATE KEY");
    let is_azure = ["AccountKey=", "SharedAccessSignature=", "SharedAccessKey="]
        .iter()
        .any(|start| text.contains(start));
    is_json_token || is_private_key || is_azure || has_password_in_url(text)
}

/// Returns whether a text has a URL of the form `scheme://user:password@host`.
fn has_password_in_url(text: &str) -> bool {
    text.split("://").skip(1).any(|rest| {
        let host = rest.split(['/', '?', '#', ' ', '"', ',']).next().unwrap_or_default();
        let user = host.rsplit_once('@').map(|(user, _)| user);
        user.and_then(|user| user.split_once(':')).is_some_and(|(_, password)| !password.is_empty())
    })
}

/// Length of a JSON Web Token that holds anything.
const JSON_TOKEN_LEN_MIN: usize = 40;
/// Limit of the server.
const KEY_LEN_MAX: usize = 253;
/// Words in the names of variables with long random values.
const KEY_WORDS: [&str; 5] = ["AUTH", "KEY", "PASS", "PAT", "TOKEN"];
/// Last words in the names of variables that hold the path of a file with a credential.
const PATH_WORDS: [&str; 5] = ["CREDENTIALS", "DIR", "FILE", "FOLDER", "PATH"];
/// Length of the shortest random value.
const RANDOM_LEN_MIN: usize = 16;
/// Last words in the names of variables that name a credential that is stored elsewhere.
const REFERENCE_WORDS: [&str; 2] = ["ARN", "NAME"];
/// Words in the names of variables with any secret value.
const SECRET_WORDS: [&str; 11] = [
    "ACCESSKEY",
    "APIKEY",
    "CREDENTIAL",
    "CREDENTIALS",
    "PASSPHRASE",
    "PASSWD",
    "PASSWORD",
    "PRIVATEKEY",
    "PW",
    "SECRET",
    "SECRETS",
];
/// Beginnings of tokens, with the shortest length of the whole token.
const TOKENS: [(&str, usize); 16] = [
    ("AIza", 39),
    ("AKIA", 20),
    ("ASIA", 20),
    ("dckr_pat_", 30),
    ("ghp_", 36),
    ("gho_", 36),
    ("ghs_", 36),
    ("ghu_", 36),
    ("github_pat_", 40),
    ("glpat-", 20),
    ("hf_", 30),
    ("npm_", 36),
    ("sk-", 32),
    ("xoxb-", 30),
    ("xoxp-", 30),
    ("ya29", 40),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_gives_all_its_keys_or_one_of_them_under_any_name() {
        let one = |variable: &str, key: &str| SecretEnv {
            secret: "bucket".into(),
            variable: Some((variable.into(), key.into())),
        };
        let all = SecretEnv { secret: "bucket".into(), variable: None };
        assert_eq!(parse_env_from_secret("bucket"), Ok(all));
        assert_eq!(parse_env_from_secret("bucket:KEY"), Ok(one("KEY", "KEY")));
        assert_eq!(parse_env_from_secret("KEY=bucket:key.1"), Ok(one("KEY", "key.1")));
        for bad in [
            "",
            "Bucket",
            "bucket:",
            "bucket:a b",
            ":KEY",
            "KEY=bucket",
            "=bucket:k",
            "A B=s:k",
            "bucket:1st",
            "bucket:ELASTICDL_JOB",
            "ELASTICDL_JOB=bucket:k",
        ] {
            assert!(parse_env_from_secret(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn credentials_are_recognized_by_the_name_of_their_variable() {
        let random = "wJalrXUtnFEMI1K7MDENGbPxRfiCYz";
        for (name, value) in [
            ("AWS_SECRET_ACCESS_KEY", random),
            ("AWS_SECRET_ACCESS_KEY", "/JalrXUtnFEMI1K7MDENGbPxRfiCYz"),
            ("AWS_SESSION_TOKEN", random),
            ("DB_PASSWORD", "hunter2"),
            ("MY_PW", "hunter2"),
            ("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567"),
            ("azure_storage_account_key", random),
            ("MY-SECRET", "x"),
            ("GOOGLE_APPLICATION_CREDENTIALS", "{\"type\": \"service_account\"}"),
        ] {
            assert!(is_credential(name, value), "{name}={value}");
        }
        for (name, value) in [
            ("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/token"),
            ("GOOGLE_APPLICATION_CREDENTIALS", "/etc/key.json"),
            ("TOKENIZERS_PARALLELISM", "false"),
            ("MAX_TOKENS", "4096"),
            ("PAD_TOKEN", "<pad>"),
            ("SORT_KEY", "the_time_of_the_record"),
            ("SECRET_NAME", "bucket"),
            ("USE_SECRETS", "true"),
            ("DB_PASSWORD", ""),
            ("AWS_REGION", "eu-central-1"),
            ("LOG", "debug"),
        ] {
            assert!(!is_credential(name, value), "{name}={value}");
        }
    }

    #[test]
    fn credentials_are_recognized_by_their_form_under_any_name() {
        // Made of parts, so that no scanner takes this file for a leak.
        let of = |start: &str, len: usize| format!("{start}{}", "Z9".repeat(len));
        for value in [
            of("AKIA", 8),
            format!("AKIA{}", "IOSFODNN".repeat(2)),
            format!("ghp_{}", "abc".repeat(12)),
            of("ghp_", 18),
            of("hf_", 17),
            of("sk-", 24),
            format!("--token={}", of("glpat-", 10)),
            format!("{}.{}.{}", of("eyJ", 10), of("eyJ", 10), of("", 12)),
            format!("-----BEGIN {} KEY-----\nMIIE", "RSA PRIVATE"),
            "DefaultEndpointsProtocol=https;AccountKey=abc==".into(),
            "postgres://user:pass@db/x".into(),
            "see https://u:p@host:80/a, then".into(),
        ] {
            assert!(has_credential_form(&value) && is_credential("A", &value), "{value}");
        }
        for value in [
            "s3://bucket/AKIA",
            "https://host:8080/a@b:c",
            "https://user@host/",
            "sk-learn",
            "AKIA-is-the-start-of-the-id-of-a-key",
            "hf_the_name_of_a_cache_of_the_hub",
            "/data/hf_hub",
            "eyJhbGciOi",
            "a.b.c",
            "AccountKey",
            "user:pass@host",
        ] {
            assert!(!has_credential_form(value), "{value}");
        }
    }
}
