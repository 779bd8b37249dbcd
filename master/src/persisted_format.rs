//! The format of the persisted job, in a job's directory and in its anchor.
//!
//! A field that older programs can ignore is added with a serde default, and the version stays. A
//! change that they would misread, or that this program can't read any more, gets a new version.
//! Nothing is released yet, and a few fields have a default all the same.
//!
//! **Invariant:** a job of another format is refused before anything is changed.

use std::fmt;

use serde::Deserialize;

/// The version that this release writes, and reads.
pub(crate) const VERSION: u32 = 4;
/// This release.
pub(crate) const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// The first fields of a persisted job of any version.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Head {
    /// Version of the format.
    pub(crate) version: u32,
    /// Release of the writer.
    #[serde(default)]
    pub(crate) release: String,
}

/// A persisted job of a format that this release does not continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherFormat(Head);

impl Head {
    /// Checks that this release continues the job.
    ///
    /// # Errors
    /// It is of another format.
    pub(crate) fn check(self) -> Result<(), OtherFormat> {
        if self.version == VERSION { Ok(()) } else { Err(OtherFormat(self)) }
    }
}

impl fmt::Display for OtherFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(Head { version, release }) = self;
        write!(
            f,
            "the job is of format {version} (elasticdl {release}), and this program (elasticdl \
             {RELEASE}) continues jobs of format {VERSION} only; finish it with the release that \
             started it, or start a new job, from its checkpoints (--resume-from) if it has any"
        )
    }
}

impl std::error::Error for OtherFormat {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_of_another_format_is_refused_with_its_release_and_what_to_do() {
        let head = |version| Head { version, release: "9.1.0".into() };
        assert_eq!(head(VERSION).check(), Ok(()), "whichever release wrote it");
        for version in [VERSION - 1, VERSION + 1] {
            let error = head(version).check().unwrap_err().to_string();
            for part in ["elasticdl 9.1.0", "of format 4 only", "finish it with", "--resume-from"] {
                assert!(error.contains(part), "{part:?} is not in: {error}");
            }
        }
    }
}
