//! Location of a trained model: an exported file, or a checkpoint.

use elasticdl_data::storage::{Storage, StorageError};
use elasticdl_tables::Table;

use crate::checkpoint::{self, CheckpointLookup};
use crate::exported_tables::TrainedRows;
use crate::model::NamedTensor;
use crate::paths;
use crate::weights;

/// Checks that there is a model, before any worker waits for it.
///
/// # Errors
/// A description of the content found instead, and the remedy.
pub(crate) fn check(address: &str) -> Result<(), String> {
    // Opening a pipe would wait for its writer, and each worker reads the whole model.
    if paths::names_device(address) {
        return Err(format!(
            "{address}: a pipe, socket or device; name an exported file or a checkpoint"
        ));
    }
    match checkpoint_at(address)? {
        Some(_) => Ok(()),
        None => weights::check_exists(address).map_err(|error| error.to_string()),
    }
}

/// Reads the parameters, `[parameters]`, in the order of the model's tensors.
///
/// # Errors
/// The error of the storage, or how the file differs from the model's tensors or its own digests.
pub(crate) fn load(
    address: &str,
    layout: &[NamedTensor],
    parameters: &mut [f32],
) -> Result<(), String> {
    match checkpoint_at(address)? {
        Some(folder) => checkpoint::load_parameters(&folder, parameters),
        None => weights::load(address, layout, parameters).map_err(|error| error.to_string()),
    }
}

/// The rows of the model's tables; `None`: it has none.
///
/// # Errors
/// The model at `address` has other tables, or is a checkpoint.
pub(crate) fn rows(address: &str, tables: &[Table]) -> Result<Option<TrainedRows>, String> {
    match checkpoint_at(address)? {
        Some(folder) if !tables.is_empty() => Err(format!(
            "{folder}: the rows of tables in a checkpoint can't be read here; name an exported \
             model: train on with --resume-from and --export"
        )),
        Some(_) => Ok(None),
        None => TrainedRows::open(address, tables),
    }
}

/// The checkpoint in this folder. A folder with several checkpoints is refused: the workers might
/// disagree on the newest one.
fn checkpoint_at(address: &str) -> Result<Option<Storage>, String> {
    let text = |error: StorageError| error.to_string();
    let folder = Storage::open(address).map_err(text)?;
    match checkpoint::inspect(&folder).map_err(text)? {
        CheckpointLookup::NotFound => Ok(None),
        CheckpointLookup::Single => Ok(Some(folder)),
        CheckpointLookup::Several(furthest) => Err(format!(
            "{address} holds checkpoints; name one of them: the furthest is {}",
            folder.join(&furthest).address()
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_location_without_one_model_is_refused_with_the_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let address = folder.path().to_str().unwrap();
        for name in ["step-000000000007-0123abcd-g1", "step-000000000012-0123abcd-g2"] {
            fs::create_dir(folder.path().join(name)).unwrap();
            fs::write(folder.path().join(name).join("manifest.json"), "{}").unwrap();
        }
        let error = check(address).unwrap_err();
        assert!(error.ends_with("/step-000000000012-0123abcd-g2"), "{error}");
        let one = format!("{address}/step-000000000007-0123abcd-g1");
        assert_eq!(check(&one), Ok(()));
        let error = load(&one, &[], &mut []).unwrap_err();
        assert!(error.contains("manifest.json: it has no digest"), "{error}");
        assert!(check(&format!("{address}/none")).is_err());
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, 0o600.into()).unwrap();
        let error = check(pipe.to_str().unwrap()).unwrap_err();
        let expected = "/pipe: a pipe, socket or device; name an exported file or a checkpoint";
        assert!(error.starts_with('/') && error.ends_with(expected), "{error}");
    }
}
