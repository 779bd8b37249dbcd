//! The format of the persisted job, in a job's directory and in its anchor.
//!
//! A field that older programs can ignore is added with a serde default, and the version stays. A
//! change that they would misread, or that this program can't read any more, gets a new version.
//!
//! | version | |
//! |---|---|
//! | 1 | contains the list of files |
//! | 2 | the master leases records, and the ledger holds records |
//! | 3 | the workers know the order of the records, and the ledger holds positions in it |
//!
//! **Invariant:** a job of another format is refused before anything is changed.

use std::fmt;

use serde::Deserialize;
use serde_json::Value;

/// The version that this release writes, and reads.
pub(crate) const VERSION: u32 = 3;
/// This release.
pub(crate) const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// What all versions begin with.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Head {
    /// Version of the format.
    pub(crate) version: u32,
    /// Release of the writer; formats before 3 do not have it.
    #[serde(default)]
    pub(crate) release: Option<String>,
}

/// A persisted job of a format that this release does not continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherFormat {
    head: Head,
    /// Where the job writes its checkpoints, if it does.
    checkpoints: Option<String>,
}

impl Head {
    /// Checks that this release continues the job. `job` is its content, as far as it can be
    /// parsed.
    ///
    /// # Errors
    /// It is of another format.
    pub(crate) fn check(self, job: impl FnOnce() -> Option<Value>) -> Result<(), OtherFormat> {
        if self.version == VERSION {
            return Ok(());
        }
        let dir = |job: Value| Some(job.pointer("/spec/checkpoints/dir")?.as_str()?.to_owned());
        Err(OtherFormat { head: self, checkpoints: job().and_then(dir) })
    }
}

impl fmt::Display for OtherFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { head: Head { version, release }, checkpoints } = self;
        let age = if *version < VERSION { "an older" } else { "a newer" };
        let writer = match release {
            Some(release) => format!("elasticdl {release}"),
            None => format!("{age} release of elasticdl"),
        };
        write!(
            f,
            "the job is of {writer} (format {version}), and this program (elasticdl {RELEASE}) \
             continues jobs of format {VERSION} only; "
        )?;
        if *version > VERSION {
            return write!(f, "continue it with the release that started it, or a newer one");
        }
        write!(f, "finish it with the release that started it, or start a new job")?;
        match checkpoints {
            Some(dir) => {
                write!(
                    f,
                    " from its checkpoint, if that is of an epoch's end: --resume-from {dir:?}"
                )
            }
            None => write!(f, ", which trains from the beginning: this one writes no checkpoints"),
        }
    }
}

impl std::error::Error for OtherFormat {}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(head: Value, job: Option<Value>) -> String {
        let head: Head = serde_json::from_value(head).unwrap();
        head.check(|| job).unwrap_err().to_string()
    }

    #[test]
    fn a_job_of_another_format_is_refused_with_its_release_and_what_to_do() {
        let job = json!({"spec": {"checkpoints": {"dir": "s3://b/c"}, "shuffle": true}});
        let error = refused(json!({"version": 2}), Some(job.clone()));
        for part in [
            "an older release of elasticdl (format 2)",
            &format!("elasticdl {RELEASE}) continues jobs of format 3 only"),
            "finish it with the release that started it",
            "--resume-from \"s3://b/c\"",
        ] {
            assert!(error.contains(part), "{part:?} is not in: {error}");
        }
        let error = refused(json!({"version": 1}), Some(json!({"spec": {}})));
        assert!(error.contains("(format 1)") && error.contains("no checkpoints"), "{error}");
        let error = refused(json!({"version": 4, "release": "9.1.0"}), Some(job));
        assert!(
            error.contains("elasticdl 9.1.0 (format 4)") && !error.contains("older"),
            "{error}"
        );
        assert!(error.contains("or a newer one"), "{error}");
    }

    #[test]
    fn a_job_of_this_format_is_continued_whichever_release_wrote_it() {
        for head in [json!({"version": VERSION}), json!({"version": VERSION, "release": "0.0.1"})] {
            let head: Head = serde_json::from_value(head).unwrap();
            assert_eq!(head.check(|| unreachable!("the content is not needed")), Ok(()));
        }
    }
}
