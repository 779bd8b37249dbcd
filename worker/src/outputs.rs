//! Checks that a job writes nothing into the data that it reads: the next job would read it as
//! data, and this one would find that its data has changed. Nor may one output replace another.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use elasticdl_data::storage::Storage;
use elasticdl_data::worker::place_of;
use elasticdl_proto::{Work, WorkerOptions, split_sources};

use crate::checkpoint;
use crate::paths::{self, PREVIOUS};
use crate::weights;

/// Checks the outputs of a job against its data.
///
/// # Errors
/// The option whose output lies within the data, and the data.
pub(crate) fn check(options: &WorkerOptions) -> Result<(), String> {
    let validation = options.validation.as_ref();
    let data = split_sources(&options.training_data)
        .chain(validation.iter().flat_map(|spec| split_sources(&spec.data)))
        .map(place_of);
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
    check_apart(&[("--export", export), (BEST, best)], checkpoints)
}

/// Checks that each of `files` has a place of its own, and is not around the folder of checkpoints.
fn check_apart(files: &[(&str, Option<&str>)], checkpoints: Option<&str>) -> Result<(), String> {
    let best = files.iter().find_map(|(option, file)| (*file).filter(|_| *option == BEST));
    let mut given = files.iter().filter_map(|(option, file)| Some((option, (*file)?)));
    while let Some((option, file)) = given.next() {
        if let Some((other, _)) = given.clone().find(|(_, other)| is_same(file, other)) {
            return Err(format!("{option} {file}: it is the file of {other}, too; {APART}"));
        }
        let keeps = |best: &&str| file.strip_prefix(*best).is_some_and(is_previous);
        if best.as_ref().is_some_and(keeps) {
            return Err(format!(
                "{option} {file}: a file that --export-best replaces is kept there; {APART}"
            ));
        }
        if checkpoints.is_some_and(|folder| within(file, folder).is_some()) {
            return Err(format!("{option} {file}: it is the --checkpoint-dir, too; {APART}"));
        }
    }
    Ok(())
}

/// Whether this follows the name of a file that was kept (see `exports.rs`).
fn is_previous(rest: &str) -> bool {
    rest.strip_prefix(PREVIOUS).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn is_same(one: &str, other: &str) -> bool {
    within(one, other).is_some_and(|rest| rest.as_os_str().is_empty())
}

const BEST: &str = "--export-best";
const APART: &str = "give each output a place of its own";

/// Whether `output` is the file or folder `data`, or would be found by a reader of it.
fn holds(data: &str, output: &str) -> bool {
    // What is no path is data for a reader of its own.
    let is_data = Storage::is_remote(data) || local(data).exists();
    let within = within(data, output).filter(|_| is_data);
    // Readers leave names out that begin with a dot.
    within.is_some_and(|path| {
        !path.components().any(|part| part.as_os_str().as_encoded_bytes().starts_with(b"."))
    })
}

/// The path of `inner` within `outer`, two addresses, or an empty path, if they are the same.
/// `None`, if it is elsewhere.
fn within(outer: &str, inner: &str) -> Option<PathBuf> {
    match (Storage::is_remote(outer), Storage::is_remote(inner)) {
        (true, true) => {
            let (outer, inner) = (outer.trim_end_matches('/'), inner.trim_end_matches('/'));
            let rest = inner.strip_prefix(outer)?;
            (rest.is_empty() || rest.starts_with('/')).then(|| PathBuf::from(rest))
        }
        (false, false) => {
            let plain = |path: &str| paths::resolved(path.strip_prefix("file://").unwrap_or(path));
            plain(inner)?.strip_prefix(plain(outer)?).ok().map(PathBuf::from)
        }
        _ => None,
    }
}

/// Checks that a file can be written at `address`, and replaces nothing but a file of its own kind.
///
/// # Errors
/// What is wrong, and what would be right.
pub(crate) fn check_file(address: &str) -> Result<(), String> {
    if paths::names_device(address) {
        return Err(format!(
            "{address} is a device, pipe or socket, which the file would replace; name a file"
        ));
    }
    let path = match Storage::is_remote(address) {
        true => Some(PathBuf::from(address)),
        false => paths::resolved(address.strip_prefix("file://").unwrap_or(address)),
    };
    let folder = path.as_deref().and_then(Path::parent).and_then(Path::to_str);
    let folder = folder.and_then(|folder| Storage::open(folder).ok());
    if folder.is_some_and(|folder| checkpoint::is_checkpoint(&folder).unwrap_or(false)) {
        return Err(format!(
            "{address} is within a checkpoint, with which it would be removed; name a file \
             elsewhere"
        ));
    }
    weights::check_writable(address).map_err(|error| error.to_string())?;
    let beside = path.filter(|_| !Storage::is_remote(address));
    let beside = beside.map(|path| paths::previous_of(&path.to_string_lossy(), 99));
    match beside.map(fs::symlink_metadata) {
        Some(Err(error)) if error.kind() == ErrorKind::InvalidFilename => Err(format!(
            "{address}: the name is too long for files that lie beside it, which have some 15 \
             bytes more ({PREVIOUS}); choose a shorter one"
        )),
        _ => Ok(()),
    }
}

/// As [`check_file`], for a file that replaces the model of an earlier job without a trace: that it
/// replaces no file of another kind.
///
/// # Errors
/// What is wrong, and what would be right.
pub(crate) fn check_model(address: &str) -> Result<(), String> {
    check_file(address)?;
    match weights::is_another_file(address) {
        Ok(true) => Err(format!(
            "{address} exists and is no model (safetensors): it would be replaced; name another \
             file, or remove this one first"
        )),
        // A place that can't be read has been written to.
        Ok(false) | Err(_) => Ok(()),
    }
}

fn local(path: &str) -> &Path {
    Path::new(path.strip_prefix("file://").unwrap_or(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_within_a_checkpoint_and_one_in_place_of_a_device_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = folder.path().join("step-000000000007-0123abcd-g1");
        fs::create_dir(&checkpoint).unwrap();
        fs::write(checkpoint.join("manifest.json"), "{}").unwrap();
        for name in ["manifest.json", "m.safetensors"] {
            let error = check_file(checkpoint.join(name).to_str().unwrap()).unwrap_err();
            assert!(error.contains("is within a checkpoint"), "{error}");
        }
        assert_eq!(check_file(folder.path().join("m").to_str().unwrap()), Ok(()));
        let error = check_file("/dev/null").unwrap_err();
        assert!(error.contains("is a device"), "{error}");
    }

    #[test]
    fn a_model_replaces_a_model_and_no_file_of_another_kind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m");
        let at = path.to_str().unwrap();
        let check = |content: &[u8]| {
            fs::write(&path, content).unwrap();
            check_model(at)
        };
        let header = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
        assert_eq!(check_model(at), Ok(()));
        assert_eq!(check(b""), Ok(()));
        assert_eq!(check(&header("{}")), Ok(()));
        let model = r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        let whole = [&header(model)[..], &[0; 8]].concat();
        assert_eq!(check(&whole), Ok(()));
        let numbers: Vec<u8> = (0..9_u64).flat_map(u64::to_le_bytes).collect();
        let others = [b"1\n2\n3\n4\n5\n", &b"x"[..], &header("[1, 2]"), &[0; 1000], &numbers];
        for other in others.into_iter().chain([&whole[..whole.len() - 1]]) {
            let error = check(other).unwrap_err();
            assert!(error.contains("exists and is no model (safetensors)"), "{error}");
        }
    }

    #[test]
    fn an_output_that_would_replace_another_is_refused_with_both_options() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path).to_str().unwrap().to_owned();
        let check = |export: &str, best: &str, checkpoints: Option<&str>| {
            check_apart(&[("--export", Some(export)), ("--export-best", Some(best))], checkpoints)
        };
        assert_eq!(check(&at("m"), &at("best"), Some(&at("ck"))), Ok(()));
        assert_eq!(check("s3://b/m", "s3://b/m2", Some("s3://b/ck")), Ok(()));
        for (one, other) in [(at("m"), at("./x/../m")), ("s3://b/m".into(), "s3://b/m".into())] {
            let error = check(&one, &other, None).unwrap_err();
            assert_eq!(
                error,
                format!("--export {one}: it is the file of --export-best, too; {APART}")
            );
        }
        for kept in ["best.previous", "best.previous.2"] {
            let error = check(&at(kept), &at("best"), None).unwrap_err();
            assert!(error.contains("a file that --export-best replaces is kept there"), "{error}");
        }
        assert_eq!(check(&at("best.previously"), &at("best"), None), Ok(()));
        for checkpoints in ["m", "m/ck"] {
            let error = check(&at("m"), &at("best"), Some(&at(checkpoints))).unwrap_err();
            assert!(error.contains("it is the --checkpoint-dir"), "{error}");
        }
    }

    #[test]
    fn a_name_that_leaves_no_bytes_for_the_names_beside_it_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let named = |len| folder.path().join("m".repeat(len)).to_str().unwrap().to_owned();
        assert_eq!(check_file(&named(240)), Ok(()));
        let error = check_file(&named(250)).unwrap_err();
        assert!(error.contains("too long for files that lie beside it"), "{error}");
    }

    #[test]
    fn an_output_within_the_data_is_recognized_however_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("data/deep")).unwrap();
        fs::write(root.join("data/a.csv"), "x").unwrap();
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
