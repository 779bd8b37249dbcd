//! Rows of an exported model, as another program reads them.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors};
use serde_json::Value;

/// A row of a table.
#[derive(Clone, Debug, PartialEq)]
pub struct ExportedRow {
    /// Records that touched it.
    pub touches: u32,
    /// `[dim]`.
    pub values: Vec<f32>,
}

/// Rows of a table by id, from the model at `path`. Every part is in its folder, and nothing else.
pub fn exported_rows(path: &Path, table: &str) -> BTreeMap<u64, ExportedRow> {
    let note = note(path);
    let parts = note["parts"].as_array().expect("there are parts");
    let parts: Vec<&str> =
        parts.iter().map(|part| part["file"].as_str().expect("a file")).collect();
    let folder = path.parent().expect("a file is in a folder");
    let name = path.file_name().expect("a file has a name").to_string_lossy();
    let found = std::fs::read_dir(folder.join(format!("{name}.tables"))).expect("it has rows");
    assert_eq!(found.count(), parts.len(), "there are other files beside the parts");
    let mut rows = BTreeMap::new();
    for part in parts {
        let bytes = std::fs::read(folder.join(part)).expect("the part is there");
        let file = SafeTensors::deserialize(&bytes).expect("a part is a safetensors file");
        let tensor = |suffix: &str| {
            let tensor = file.tensor(&format!("{table}{suffix}")).expect("the table is there");
            (tensor.dtype(), tensor.shape().to_vec(), tensor.data())
        };
        let ((ids_type, _, ids), (touches_type, _, touches)) = (tensor(".ids"), tensor(".touches"));
        let (values_type, shape, values) = tensor("");
        assert_eq!((ids_type, touches_type, values_type), (Dtype::U64, Dtype::U32, Dtype::F32));
        let values: Vec<f32> =
            values.chunks_exact(4).map(|v| f32::from_le_bytes(four(v))).collect();
        let columns = ids.chunks_exact(8).zip(touches.chunks_exact(4));
        for ((id, touches), values) in columns.zip(values.chunks_exact(shape[1])) {
            let id = u64::from_le_bytes(id.try_into().expect("eight bytes"));
            let touches = u32::from_le_bytes(four(touches));
            let row = ExportedRow { touches, values: values.to_vec() };
            assert_eq!(rows.insert(id, row), None, "row {id} is there twice");
        }
    }
    rows
}

/// Touches of the first table of the model at `path` that no exported row has.
pub fn touches_without_row(path: &Path) -> u64 {
    note(path)["touches_without_row"][0].as_u64().expect("there is a table")
}

/// What the model at `path` says of its tables.
fn note(path: &Path) -> Value {
    let bytes = std::fs::read(path).expect("a model was exported");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("it is a safetensors file");
    let notes = header.metadata().as_ref().expect("it has notes");
    serde_json::from_str(&notes["elasticdl.tables"]).expect("a note is JSON")
}

fn four(bytes: &[u8]) -> [u8; 4] {
    bytes.try_into().expect("four bytes")
}
