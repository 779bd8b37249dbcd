//! Checks that a job writes nothing into the data that it reads: the next job would read it as
//! data, and this one would find that its data has changed.

use std::path::PathBuf;

use elasticdl_proto::{Work, WorkerOptions, split_sources};

use crate::paths;
use crate::readers::folder_of;
use crate::storage::Storage;

/// Checks the outputs of a job against its data.
///
/// # Errors
/// The option whose output lies within the data, and the data.
pub(crate) fn check(options: &WorkerOptions) -> Result<(), String> {
    let validation = options.validation.as_ref();
    let data = split_sources(&options.training_data)
        .chain(validation.iter().flat_map(|spec| split_sources(&spec.data)))
        .map(folder_of);
    let best = validation.and_then(|spec| spec.export_best.as_deref());
    let (export, predictions) = match &options.work {
        Work::Train { export } => (export.as_deref(), None),
        Work::Predict { output, .. } => (None, Some(output.as_str())),
        Work::Evaluate { .. } => (None, None),
    };
    let checkpoints = options.checkpoints.as_ref().map(|kept| &*kept.dir);
    let outputs = [
        ("--checkpoint-dir", checkpoints),
        ("--export", export),
        ("--export-best", best),
        ("--predictions", predictions),
    ];
    for source in data {
        for (option, output) in outputs {
            let Some(output) = output else { continue };
            // A pair of files is written with a comma between them.
            if let Some(data) =
                std::iter::once(source).chain(source.split(',')).find(|data| holds(data, output))
            {
                return Err(format!(
                    "{option} {output}: it is within the data {data}, and would be read as data; \
                     choose a place outside of it"
                ));
            }
        }
    }
    Ok(())
}

/// Whether `output` is the file or folder `data`, or would be found by a reader of it.
fn holds(data: &str, output: &str) -> bool {
    let within = match (Storage::is_remote(data), Storage::is_remote(output)) {
        (true, true) => {
            let (data, output) = (data.trim_end_matches('/'), output.trim_end_matches('/'));
            let rest = output.strip_prefix(data);
            rest.filter(|rest| rest.is_empty() || rest.starts_with('/')).map(PathBuf::from)
        }
        (false, false) => {
            let plain = |path: &str| paths::resolved(path.strip_prefix("file://").unwrap_or(path));
            let (Some(data), Some(output)) = (plain(data), plain(output)) else { return false };
            // What is no path is data for a reader of its own.
            let exists = data.exists();
            output.strip_prefix(&data).ok().filter(|_| exists).map(PathBuf::from)
        }
        _ => None,
    };
    // Readers leave names out that begin with a dot.
    within.is_some_and(|path| {
        !path.components().any(|part| part.as_os_str().as_encoded_bytes().starts_with(b"."))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_within_the_data_is_recognized_however_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("data/deep")).unwrap();
        std::fs::write(root.join("data/a.csv"), "x").unwrap();
        std::os::unix::fs::symlink(root.join("data"), root.join("link")).unwrap();
        std::os::unix::fs::symlink(root.join("data/deep"), root.join("out")).unwrap();
        let at = |path: &str| root.join(path).to_str().unwrap().to_owned();
        let here = std::env::current_dir().unwrap();
        let up = "../".repeat(here.components().count() - 1);
        let relative = format!("{}{}", up, at("data/ck").trim_start_matches('/'));
        for (data, output) in [
            (at("data"), at("data")),
            (at("data"), at("data/ck/a")),
            (at("data/"), at("data/./ck")),
            (at("data"), at("new/../data/ck")),
            (at("data"), at("link/ck")),
            (at("link"), at("data/ck")),
            (at("data"), at("out")),
            (at("data"), relative),
            (format!("file://{}", at("data")), at("data/ck")),
            (at("data/a.csv"), at("data/a.csv")),
            ("s3://b/k".into(), "s3://b/k/ck".into()),
            ("s3://b".into(), "s3://b/ck".into()),
            ("s3://b/k/".into(), "s3://b/k".into()),
        ] {
            assert!(holds(&data, &output), "{data} {output}");
        }
        for (data, output) in [
            (at("data"), at("data2")),
            (at("data"), at("ck")),
            (at("data"), at("data/.ck/a")),
            (at("data/deep"), at("data")),
            (at("data/a.csv"), at("data/b")),
            (at("none"), at("none/ck")),
            ("s3://b/k".into(), "s3://b/k2".into()),
            ("s3://b/k".into(), "s3://c/k/ck".into()),
            ("s3://b/k".into(), at("data")),
        ] {
            assert!(!holds(&data, &output), "{data} {output}");
        }
    }
}
