//! A model's parameters as a safetensors file: the exported result of a job, and an initial model.
//!
//! candle and PyTorch read the file directly. It has one tensor of `F32` for each tensor of
//! [`Model::tensors`], with its name and shape, little-endian and in row-major order.
//!
//! [`Model::tensors`]: crate::Model::tensors

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use elasticdl_data::storage::{Storage, StorageError};
use elasticdl_proto::limits::clip;
use safetensors::tensor::{Dtype, Metadata, SafeTensors, TensorInfo};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::model::NamedTensor;
use elasticdl_data::worker::random_digits;

use crate::paths;

/// Why parameters could not be written or read. The text names the file and the tensor.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WeightsError {
    /// The model's tensors are not usable. Fix [`Model::tensors`](crate::Model::tensors).
    #[error("tensors() names {0}")]
    Layout(String),
    /// The file does not contain this model. Use another file, or the options with which it was
    /// exported.
    #[error("{path}: {reason}")]
    Mismatch { path: String, reason: String },
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The address names a folder, not a file.
    #[error("{0} is a folder; name a file, for example {file}", file = within(.0))]
    Folder(String),
    /// The other workers, which have rows of the model, do not take part any more.
    #[error("the group of workers has broken")]
    Broken,
    /// A worker has not written its rows.
    #[error("{0}")]
    Rows(String),
}

/// Checks the names and shapes of a model's tensors.
///
/// # Errors
/// [`WeightsError::Layout`].
pub(crate) fn check(tensors: &[NamedTensor]) -> Result<(), WeightsError> {
    header(tensors, None).map(drop)
}

/// Checks that a file can be written at `address`, before training starts.
///
/// # Errors
/// [`WeightsError::Folder`], or an error of the storage.
pub(crate) fn check_writable(address: &str) -> Result<(), WeightsError> {
    if paths::names_folder(address) {
        return Err(WeightsError::Folder(address.into()));
    }
    Ok(probe(address)?)
}

/// Writes a file next to `address`, and removes it. Its name is random, so it conflicts with no
/// other file, and begins with a dot, so that no reader takes it for data.
///
/// # Errors
/// An error of the storage, for `address`.
pub(crate) fn probe(address: &str) -> Result<(), StorageError> {
    let folder = address.rfind('/').map_or("", |slash| &address[..=slash]);
    let probe = format!("{folder}.probe-{}", random_digits());
    let written = Storage::open(&probe).and_then(|probe| {
        probe.write("", vec![Bytes::from_static(b"checks that this location is writable")])?;
        probe.remove("")
    });
    written.map_err(|error| error.renamed(address))?;
    // The name may be longer than the file system permits.
    if Storage::is_remote(address) {
        return Ok(());
    }
    match Storage::open(address)?.bytes("") {
        Ok(_) | Err(StorageError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Writes `parameters` to `address` atomically and without copying them.
///
/// # Errors
/// [`WeightsError::Layout`], or an error of the storage.
pub(crate) fn save(
    address: &str,
    tensors: &[NamedTensor],
    parameters: &Arc<Vec<f32>>,
) -> Result<(), WeightsError> {
    save_noted(address, tensors, parameters, Vec::new())
}

/// Like [`save`], with `notes`, names and texts, which [`note`] reads.
pub(crate) fn save_noted(
    address: &str,
    tensors: &[NamedTensor],
    parameters: &Arc<Vec<f32>>,
    notes: Vec<(&str, String)>,
) -> Result<(), WeightsError> {
    let header = header(tensors, notes)?;
    let values = Bytes::from_owner(Values(Arc::clone(parameters)));
    let file = Storage::open(address)?;
    file.write("", vec![header.into(), values])?;
    // A model has one writer at a time: the lowest rank.
    if let Err(error) = file.remove_unfinished() {
        tracing::debug!(%error, "what a killed writer has left is still there");
    }
    Ok(())
}

/// The file that an export has written to `address`, or will replace.
pub(crate) fn exported(address: &str) -> Result<Storage, StorageError> {
    Storage::open(address).map(Storage::of_outputs)
}

/// Reads the note of this `name` in a file. `None`: it has none, or is a file of another kind.
///
/// # Errors
/// [`StorageError::NotFound`], or an error of the storage.
pub(crate) fn note(file: &Storage, name: &str) -> Result<Option<String>, StorageError> {
    #[derive(Deserialize)]
    struct Header {
        #[serde(rename = "__metadata__")]
        notes: HashMap<String, String>,
    }
    let header: Option<(Header, u64)> = header_of(file)?;
    Ok(header.and_then(|(mut header, _)| header.notes.remove(name)))
}

/// Whether the file at `address` is no model: neither whole safetensors nor empty.
///
/// # Errors
/// [`StorageError::NotFound`], or an error of the storage.
pub(crate) fn is_another_file(address: &str) -> Result<bool, StorageError> {
    let file = Storage::open(address)?;
    let bytes = file.bytes("")?;
    if bytes == 0 {
        return Ok(false);
    }
    let header: Option<(Metadata, u64)> = header_of(&file)?;
    Ok(header.is_none_or(|(tensors, start)| start + tensors.data_len() as u64 != bytes))
}

/// The header of a file and its end, if it is safetensors.
fn header_of<T: DeserializeOwned>(file: &Storage) -> Result<Option<(T, u64)>, StorageError> {
    let bytes = file.bytes("")?;
    if bytes <= HEADER_START {
        return Ok(None);
    }
    let start = file.read_range("", 0..HEADER_START)?;
    let header = start[..].try_into().map_or(u64::MAX, u64::from_le_bytes);
    if header == 0 || header > (bytes - HEADER_START).min(HEADER_MAX) {
        return Ok(None);
    }
    let end = HEADER_START + header;
    let header = file.read_range("", HEADER_START..end)?;
    Ok(serde_json::from_slice(&header).ok().map(|header| (header, end)))
}

/// Checks that the file at `address` exists, before workers are started for it.
///
/// # Errors
/// An error of the storage.
pub(crate) fn check_exists(address: &str) -> Result<(), StorageError> {
    Storage::open(address)?.bytes("").map(drop)
}

/// Reads `parameters`, the elements of `tensors`, from a file, which may have been written by
/// another program. Additional tensors are ignored.
///
/// # Errors
/// An error of the storage, or a tensor that does not match the model.
pub(crate) fn load(
    address: &str,
    tensors: &[NamedTensor],
    parameters: &mut [f32],
) -> Result<(), WeightsError> {
    check(tensors)?;
    let bytes = Storage::open(address)?.read("")?;
    let mismatch = |reason: String| WeightsError::Mismatch { path: address.into(), reason };
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|error| mismatch(format!("not a safetensors file: {error}")))?;
    let mut rest = parameters;
    for NamedTensor { name, shape } in tensors {
        let tensor = file.tensor(name).map_err(|_| {
            let mut names = file.names();
            names.sort_unstable();
            let names = clip(names.join(", "), NAMES_BYTES_MAX);
            mismatch(format!("no tensor {name:?}, which the model has; the file has {names}"))
        })?;
        if tensor.dtype() != Dtype::F32 || tensor.shape() != shape {
            let (dtype, found) = (tensor.dtype(), tensor.shape());
            return Err(mismatch(format!(
                "tensor {name:?} is {dtype:?} of shape {found:?} where the model has F32 of shape \
                 {shape:?}"
            )));
        }
        let (part, after) = rest.split_at_mut(shape.iter().product());
        bytemuck::cast_slice_mut(part).copy_from_slice(tensor.data());
        rest = after;
    }
    Ok(())
}

/// The header of a file of parameters.
fn header<'a>(
    tensors: &[NamedTensor],
    notes: impl IntoIterator<Item = (&'a str, String)>,
) -> Result<Vec<u8>, WeightsError> {
    let named = |tensor: &NamedTensor| (tensor.name.clone(), Dtype::F32, tensor.shape.clone());
    encode_header(tensors.iter().map(named).collect(), notes)
}

/// The header of a file with these tensors, one after the other.
///
/// # Errors
/// [`WeightsError::Layout`].
pub(crate) fn encode_header<'a>(
    tensors: Vec<(String, Dtype, Vec<usize>)>,
    notes: impl IntoIterator<Item = (&'a str, String)>,
) -> Result<Vec<u8>, WeightsError> {
    let mut end = 0usize;
    let mut infos = Vec::with_capacity(tensors.len());
    let mut names = HashSet::new();
    for (name, dtype, shape) in tensors {
        if !names.insert(name.clone()) || name.is_empty() || name == "__metadata__" {
            return Err(WeightsError::Layout(format!(
                "{name:?}, which is not usable: each tensor needs a unique name"
            )));
        }
        let values = shape.iter().try_fold(1usize, |values, &n| values.checked_mul(n));
        let bytes = values.and_then(|values| values.checked_mul(dtype.bitsize() / 8));
        let range = bytes.and_then(|bytes| Some((end, end.checked_add(bytes)?)));
        let data_offsets = range.ok_or_else(|| {
            WeightsError::Layout(format!("{name:?} with too large a shape: {shape:?}"))
        })?;
        end = data_offsets.1;
        infos.push((name, TensorInfo { dtype, shape, data_offsets }));
    }
    /// Like [`Metadata`], with the notes in the order of their names: the same model is the same
    /// file.
    #[derive(Serialize)]
    struct Header {
        #[serde(rename = "__metadata__")]
        notes: BTreeMap<String, String>,
        #[serde(flatten)]
        tensors: Metadata,
    }
    let tensors = Metadata::new(None, infos).map_err(|e| WeightsError::Layout(e.to_string()))?;
    // PyTorch's loaders require this entry.
    let mut texts = BTreeMap::from([("format".into(), "pt".into())]);
    texts.extend(notes.into_iter().map(|(name, text)| (name.to_owned(), text)));
    let header = Header { notes: texts, tensors };
    let mut json = serde_json::to_vec(&header).expect("names and numbers are JSON");
    // Aligns the values, for programs that map the file into memory.
    json.resize(json.len().next_multiple_of(ALIGNMENT), b' ');
    Ok([&(json.len() as u64).to_le_bytes()[..], &json].concat())
}

/// An example of a file in the folder at `address`.
fn within(address: &str) -> String {
    format!("{}/model.safetensors", address.trim_end_matches(['/', '.']).trim_end_matches('/'))
}

/// Shared parameters as bytes.
struct Values(Arc<Vec<f32>>);

impl AsRef<[u8]> for Values {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

// Values are written in memory order.
#[cfg(target_endian = "big")]
compile_error!("safetensors are little-endian");

const ALIGNMENT: usize = 8;
/// Bytes before the header, which hold its length.
const HEADER_START: u64 = 8;
/// Limit of the format.
const HEADER_MAX: u64 = 100_000_000;
const NAMES_BYTES_MAX: usize = 500;

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, shape: &[usize]) -> NamedTensor {
        NamedTensor { name: name.into(), shape: shape.into() }
    }

    fn decoded(bytes: &[u8]) -> Vec<f32> {
        bytes.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect()
    }

    fn place() -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/model.safetensors").to_str().unwrap().to_owned();
        (folder, path)
    }

    #[test]
    fn saved_tensors_are_loaded_by_name_and_shape() {
        let (_folder, path) = place();
        let tensors = [
            tensor("b", &[2, 3]),
            tensor("a", &[]),
            tensor("empty", &[0, 4]),
            tensor("ä \"", &[1]),
        ];
        let parameters: Vec<f32> = (0..8).map(|i| i as f32 * 0.5).collect();
        save(&path, &tensors, &Arc::new(parameters.clone())).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("b").unwrap().shape(), [2, 3]);
        let a: &[f32] = &decoded(file.tensor("a").unwrap().data());
        assert_eq!(a, [3.0]);
        assert_eq!(bytes[bytes.len() - 32..], *bytemuck::cast_slice::<f32, u8>(&parameters));
        let mut other_order = [f32::NAN; 2];
        load(&path, &[tensor("ä \"", &[1]), tensor("a", &[])], &mut other_order).unwrap();
        assert_eq!(other_order, [3.5, 3.0]);
        let mut all = [f32::NAN; 8];
        load(&path, &tensors, &mut all).unwrap();
        assert_eq!(all[..], parameters);
    }

    #[test]
    fn the_same_model_with_the_same_note_is_the_same_file() {
        let note = |name: &'static str| Some((name, "text".to_owned()));
        let header = |name| header(&[tensor("b", &[1]), tensor("a", &[1])], note(name)).unwrap();
        for name in ["elasticdl.best", "a", "z"] {
            assert!((0..20).all(|_| header(name) == header(name)), "{name}");
        }
        let text = String::from_utf8(header("elasticdl.best")[8..].to_vec()).unwrap();
        let start = "{\"__metadata__\":{\"elasticdl.best\":\"text\",\"format\":\"pt\"},\"b\":{";
        assert!(text.starts_with(start), "{text}");
    }

    #[test]
    fn what_a_killed_writer_has_left_is_removed_by_the_next_one_and_nothing_else() {
        let (_folder, path) = place();
        let save = |path: &str| save(path, &[tensor("a", &[1])], &Arc::new(vec![1.0])).unwrap();
        save(&path);
        let folder = std::path::Path::new(&path).parent().unwrap();
        // As the writers of this file and of another one leave it.
        let start = format!(".#{:08x}", xxhash_rust::xxh3::xxh3_64(b"model.safetensors") as u32);
        for name in [&format!("{start}00000001"), ".#0123456789abcdef", &format!("{start}x")] {
            std::fs::write(folder.join(name), "unfinished").unwrap();
        }
        save(&path);
        let left = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        let mut left = left.map(|name| name.into_string().unwrap()).collect::<Vec<_>>();
        left.sort();
        let mut expected =
            [".#0123456789abcdef", &format!("{start}x"), "model.safetensors"].map(str::to_owned);
        expected.sort();
        assert_eq!(left, expected);
    }

    #[test]
    fn a_file_of_another_model_is_refused_with_the_tensor_that_differs() {
        let (folder, path) = place();
        save(&path, &[tensor("a", &[2, 2])], &Arc::new(vec![0.0; 4])).unwrap();
        let mut values = [0.0; 4];
        let mut load = |path: &str, tensors: &[NamedTensor]| {
            load(path, tensors, &mut values).unwrap_err().to_string()
        };
        let expected = format!("{path}: no tensor \"w\", which the model has; the file has a");
        assert_eq!(load(&path, &[tensor("w", &[4])]), expected);
        let expected = format!(
            "{path}: tensor \"a\" is F32 of shape [2, 2] where the model has F32 of shape [4]"
        );
        assert_eq!(load(&path, &[tensor("a", &[4])]), expected);
        let whole = std::fs::read(&path).unwrap();
        let torn = folder.path().join("torn").to_str().unwrap().to_owned();
        for len in 0..whole.len() {
            std::fs::write(&torn, &whole[..len]).unwrap();
            let error = load(&torn, &[tensor("a", &[2, 2])]);
            assert!(
                error.starts_with(&format!("{torn}: not a safetensors file: ")),
                "{len}: {error}"
            );
        }
        assert!(load("/nowhere/m", &[tensor("a", &[4])]).contains("/nowhere/m"));
    }

    #[test]
    fn tensors_that_no_file_can_have_are_refused() {
        let table = [
            (vec![tensor("a", &[2]), tensor("a", &[2])], "\"a\", which is not usable"),
            (vec![tensor("", &[4])], "\"\", which is not usable"),
            (vec![tensor("a", &[usize::MAX, 2])], "too large"),
        ];
        for (tensors, expected) in table {
            let error = check(&tensors).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn an_address_that_is_not_writable_is_refused_before_training() {
        let (folder, path) = place();
        check_writable(&path).unwrap();
        assert!(
            std::fs::read_dir(folder.path().join("new")).unwrap().next().is_none(),
            "the probe is removed"
        );
        std::fs::write(folder.path().join("file"), "").unwrap();
        let inside = folder.path().join("file/model").to_str().unwrap().to_owned();
        let error = check_writable(&inside).unwrap_err().to_string();
        assert!(error.contains("file/model: "), "{error}");
        for is_folder in [folder.path().to_str().unwrap().to_owned(), format!("{path}/")] {
            let error = check_writable(&is_folder).unwrap_err();
            assert!(matches!(error, WeightsError::Folder(_)), "{error}");
            assert!(error.to_string().contains("/model.safetensors"), "{error}");
        }
    }
}
