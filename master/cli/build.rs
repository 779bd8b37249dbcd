//! Names the version of a release build: the crate's, and the commit if it is known.
//!
//! The commit is that of the git checkout that the crate lies in, or `ELASTICDL_COMMIT` where there
//! is none, as in a container. A build for development has no commit, so that a commit does not
//! cause another build.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=ELASTICDL_COMMIT");
    let version = env!("CARGO_PKG_VERSION");
    let given = std::env::var("ELASTICDL_COMMIT").ok().filter(|commit| !commit.is_empty());
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = given.or_else(|| if is_release { commit_of_checkout() } else { None });
    let version = commit.map_or_else(|| version.into(), |commit| format!("{version} ({commit})"));
    println!("cargo::rustc-env=ELASTICDL_VERSION={version}");
}

/// The commit of the checkout; `None` outside of one, and without git.
fn commit_of_checkout() -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    // The crate may lie in the checkout of another project, which does not track it.
    git(&["ls-files", "--error-unmatch", "Cargo.toml"])?;
    for name in ["HEAD", "logs/HEAD"] {
        // The log of HEAD changes with each commit; HEAD itself, only with the branch.
        let path = git(&["rev-parse", "--git-path", name])?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}
