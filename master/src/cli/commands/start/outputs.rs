//! Checks that a job of this machine writes none of its own files into the data that it reads. The
//! worker that describes the data checks the outputs of the program.

use std::path::{Path, PathBuf};

use elasticdl_proto::split_sources;

use super::local_job::LocalJob;
use crate::cli::process::Failure;
use crate::job::JobSpec;

impl LocalJob {
    /// Checks the job's directory, its summary and its events for TensorBoard.
    pub(super) fn check_outputs(&self) -> Result<(), Failure> {
        let outputs = [
            ("--job-dir", Some(&self.job_dir)),
            ("--summary", self.summary.as_ref()),
            ("--tensorboard-dir", self.tensorboard_dir.as_ref()),
        ];
        for (option, output) in outputs {
            let Some(output) = output else { continue };
            if let Some(data) = data_around(&self.spec, output) {
                return Err(Failure::usage(format!(
                    "{option} {}: it is within the data {data}, and would be read as data; choose \
                     a place outside of it",
                    output.display()
                )));
            }
        }
        Ok(())
    }
}

/// The data of a job within which `output` lies, if it lies within any.
fn data_around<'a>(spec: &'a JobSpec, output: &Path) -> Option<&'a str> {
    let output = resolved(output)?;
    let validation = spec.validation.iter().flat_map(|validation| split_sources(&validation.data));
    split_sources(&spec.training_data).chain(validation).find(|data| {
        let path = Path::new(data.strip_prefix("file://").unwrap_or(data));
        let within = resolved(path).filter(|path| path.exists());
        let within = within.as_ref().and_then(|data| output.strip_prefix(data).ok());
        // Readers leave names out that begin with a dot.
        within
            .is_some_and(|path| !path.iter().any(|part| part.as_encoded_bytes().starts_with(b".")))
    })
}

/// An absolute path without links, as far as it exists.
fn resolved(path: &Path) -> Option<PathBuf> {
    let whole = std::path::absolute(path).ok()?;
    let (exists, rest) = whole.ancestors().find_map(|ancestor| {
        let rest = whole.strip_prefix(ancestor).expect("it begins with its ancestors");
        Some((ancestor.canonicalize().ok()?, rest))
    })?;
    Some(exists.join(rest).components().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{JobSpec, ValidationSpec};

    #[test]
    fn outputs_within_the_training_or_validation_data_are_recognized() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("train/deep")).unwrap();
        std::fs::create_dir_all(root.join("test")).unwrap();
        std::os::unix::fs::symlink(root.join("train/deep"), root.join("link")).unwrap();
        let at = |path: &str| root.join(path).to_str().unwrap().to_owned();
        let validation = ValidationSpec {
            data: at("test"),
            every: None,
            metric: "loss".into(),
            highest: false,
            patience: None,
            split: None,
            export_best: None,
        };
        let spec = JobSpec {
            training_data: elasticdl_proto::join_sources(&[at("none"), at("train")]),
            validation: Some(validation),
            ..crate::job::testing::spec()
        };
        let found = |output: &str| data_around(&spec, &root.join(output)).map(str::to_owned);
        for output in ["train", "train/job", "link/job", "train/../train/job/x"] {
            assert_eq!(found(output), Some(at("train")), "{output}");
        }
        assert_eq!(found("test/summary.json"), Some(at("test")));
        for output in ["job", "training", "train/.job", "none/job"] {
            assert_eq!(found(output), None, "{output}");
        }
    }
}
