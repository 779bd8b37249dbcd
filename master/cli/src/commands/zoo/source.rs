//! Source of the elasticdl dependency, for cargo and for the Dockerfile.

use std::fs;
use std::path::Path;

/// Source of the elasticdl crates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Source(Kind);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Git {
        url: String,
        revision: Option<String>,
    },
    /// A checkout: its absolute path, and its workspace members.
    Path {
        root: String,
        members: Vec<String>,
    },
    Version(String),
}

impl Source {
    /// Parses `--elasticdl`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let wanted =
            "it must be a version such as `0.1`, a git URL, or the folder of an elasticdl checkout";
        let is_quotable = |c: char| {
            !c.is_control() && !c.is_whitespace() && !matches!(c, '"' | '\\' | '$' | '\'')
        };
        if text.is_empty() || !text.chars().all(is_quotable) {
            return Err(format!("{wanted}, without spaces and quotes"));
        }
        if text.starts_with(|c: char| c.is_ascii_digit()) && !Path::new(text).exists() {
            let fit = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+');
            if !text.chars().all(fit) {
                return Err(wanted.into());
            }
            return Ok(Self(Kind::Version(text.into())));
        }
        if text.contains("://") {
            let (url, revision) = match text.split_once('#') {
                Some((url, revision)) => (url, Some(revision.into())),
                None => (text, None),
            };
            return Ok(Self(Kind::Git { url: url.into(), revision }));
        }
        let root = fs::canonicalize(text).map_err(|error| format!("{text}: {error}; {wanted}"))?;
        let root = root.to_str().filter(|root| root.chars().all(is_quotable));
        let root =
            root.ok_or_else(|| format!("{text}: its path has spaces or quotes; {wanted}"))?;
        let members = members(Path::new(root))
            .ok_or_else(|| format!("{text} is no elasticdl checkout; {wanted}"))?;
        Ok(Self(Kind::Path { root: root.into(), members }))
    }

    /// The checkout that this command was built from, if it still exists, else the version of this
    /// command.
    pub(super) fn own() -> Self {
        let checkout = Self::parse(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
        checkout.unwrap_or_else(|_| Self(Kind::Version(env!("CARGO_PKG_VERSION").into())))
    }

    /// The crate's dependency on the worker library with these features, in TOML.
    pub(super) fn dependency(&self, features: &[&str]) -> String {
        let whence = match &self.0 {
            Kind::Git { url, revision: None } => format!("git = \"{url}\""),
            Kind::Git { url, revision: Some(revision) } => {
                format!("git = \"{url}\", rev = \"{revision}\"")
            }
            Kind::Path { root, .. } => format!("path = \"{root}/worker\""),
            Kind::Version(version) if features.is_empty() => return format!("\"{version}\""),
            Kind::Version(version) => format!("version = \"{version}\""),
        };
        match features {
            [] => format!("{{ {whence} }}"),
            _ => format!("{{ {whence}, features = {features:?} }}"),
        }
    }

    /// Lines of the Dockerfile that copy a checkout to the path that Cargo.toml names.
    pub(super) fn copies(&self) -> String {
        let Kind::Path { root, members } = &self.0 else { return String::new() };
        let mut lines = format!(
            "# The elasticdl checkout that Cargo.toml names.\nCOPY --from={CONTEXT} Cargo.toml \
             Cargo.lock {root}/\n"
        );
        for member in members {
            lines.push_str(&format!("COPY --from={CONTEXT} {member} {root}/{member}\n"));
        }
        lines
    }

    /// Requirement of `pip install` for the Python package.
    pub(super) fn package(&self) -> String {
        match &self.0 {
            Kind::Git { url, revision } => {
                let revision = revision.as_ref().map(|r| format!("@{r}")).unwrap_or_default();
                format!("elasticdl @ git+{url}{revision}#subdirectory=worker/python")
            }
            Kind::Path { root, .. } => format!("{root}/worker/python"),
            Kind::Version(version) => format!("elasticdl=={version}"),
        }
    }

    /// Arguments of `cargo install` in the Dockerfile, for the `elasticdl` command.
    pub(super) fn command(&self) -> String {
        match &self.0 {
            Kind::Git { url, revision } => {
                let revision = revision.as_ref().map(|r| format!("--rev {r} ")).unwrap_or_default();
                format!("--git {url} {revision}elasticdl-cli")
            }
            Kind::Path { root, .. } => format!("--path {root}/master/cli"),
            Kind::Version(version) => format!("elasticdl-cli --version {version}"),
        }
    }
}

/// Folder that a Dockerfile needs as the build context [`CONTEXT`].
pub(super) fn context(dockerfile: &str) -> Option<&str> {
    let from = format!("--from={CONTEXT}");
    let copies = dockerfile.lines().map(str::split_whitespace);
    let mut of_checkout = copies.filter(|words| words.clone().take(2).eq(["COPY", &from]));
    of_checkout.next()?.last().map(|folder| folder.trim_end_matches('/'))
}

/// Workspace members of the checkout in `root`; `None` if `root` is no checkout.
fn members(root: &Path) -> Option<Vec<String>> {
    let worker = fs::read_to_string(root.join("worker/Cargo.toml")).ok()?;
    if !worker.lines().any(|line| line.trim() == "name = \"elasticdl\"") {
        return None;
    }
    let workspace = fs::read_to_string(root.join("Cargo.toml")).ok()?;
    let list =
        workspace.lines().find_map(|line| line.strip_prefix("members = [")?.strip_suffix(']'))?;
    let members = list.split(',').map(|member| member.trim().trim_matches('"').to_owned());
    Some(members.filter(|member| !member.is_empty()).collect())
}

/// Name of the build context of a checkout.
pub(super) const CONTEXT: &str = "elasticdl";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_names_both_the_library_and_the_command() {
        let checkout = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        let root = fs::canonicalize(checkout).unwrap();
        let root = root.to_str().unwrap();
        let (path, install) =
            (format!("{{ path = \"{root}/worker\" }}"), format!("--path {root}/master/cli"));
        let table = [
            ("0.1", "\"0.1\"", "elasticdl-cli --version 0.1"),
            (
                "https://example.com/e",
                "{ git = \"https://example.com/e\" }",
                "--git https://example.com/e elasticdl-cli",
            ),
            (
                "ssh://git@example.com/e#v1",
                "{ git = \"ssh://git@example.com/e\", rev = \"v1\" }",
                "--git ssh://git@example.com/e --rev v1 elasticdl-cli",
            ),
            (root, path.as_str(), install.as_str()),
        ];
        for (text, dependency, command) in table {
            let source = Source::parse(text).unwrap();
            assert_eq!(
                (source.dependency(&[]).as_str(), source.command().as_str()),
                (dependency, command)
            );
            assert_eq!(context(&source.copies()), (text == root).then_some(root));
        }
        assert_eq!(Source::own(), Source::parse(root).unwrap());
    }

    #[test]
    fn all_crates_of_a_checkout_are_copied_into_the_build() {
        let source = Source::own();
        let copies = source.copies();
        for member in ["collective", "examples", "master", "master/cli", "proto", "tests", "worker"]
        {
            assert!(
                copies.contains(&format!("COPY --from=elasticdl {member} /")),
                "{member}: {copies}"
            );
        }
    }

    #[test]
    fn an_invalid_source_is_rejected_with_the_valid_forms() {
        let folder = tempfile::tempdir().unwrap();
        let empty = folder.path().to_str().unwrap();
        for bad in ["", "0.1\"", "1/2", "/no such", "/absent", empty, "a'b"] {
            let error = Source::parse(bad).unwrap_err();
            assert!(
                error.contains("a version such as `0.1`, a git URL, or the folder"),
                "{bad}: {error}"
            );
        }
    }
}
