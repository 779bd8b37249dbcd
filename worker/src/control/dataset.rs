//! Between the data set of a reader and the list of files that travels.

use elasticdl_data::{Dataset, File};
use elasticdl_proto::limits::DATASET_PACKED_BYTES_MAX;
use elasticdl_proto::{FileList, ListedFile};

/// Packs a data set, or returns why it can't be sent.
pub(crate) fn pack(dataset: Dataset) -> Result<FileList, String> {
    let list = FileList::try_pack(dataset.files.into_iter().map(|file| ListedFile {
        path: file.path,
        records: file.records,
        version: file.version,
    }))
    .map_err(|error| format!("the list of the data set's files can't be sent: {error}"))?;
    let packed = list.packed().len();
    if packed > DATASET_PACKED_BYTES_MAX {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        return Err(format!(
            "the data set has {} files, whose paths take {} MiB, and {} MiB when they are \
             compressed; at most {} MiB can be sent to the master: put more records into each \
             file, or shorten the paths",
            list.len(),
            mib(list.bytes()),
            mib(packed as u64),
            mib(DATASET_PACKED_BYTES_MAX as u64)
        ));
    }
    Ok(list)
}

/// The data set of a list.
pub(crate) fn unpack(list: &FileList) -> Dataset {
    let file = |listed: ListedFile| {
        let mut file = File::new(listed.path, listed.records);
        file.version = listed.version;
        file
    };
    Dataset::new(list.iter().map(file).collect())
}
