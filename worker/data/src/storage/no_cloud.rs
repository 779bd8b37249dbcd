//! Object stores in a program without the feature `cloud`: none can be opened.

use std::error::Error;
use std::ops::Range;

use bytes::Bytes;

use super::errors::Failed;
use super::listing::{Listing, Version};

/// There are none.
#[derive(Clone, Debug)]
pub(super) struct Objects(Never);

#[derive(Clone, Debug)]
enum Never {}

impl Objects {
    pub(super) fn open(_scheme: &str, _rest: &str) -> Result<Self, String> {
        Err(crate::feature::missing("object stores", "cloud"))
    }

    pub(super) fn below(&self, _path: &str) -> Self {
        match self.0 {}
    }

    pub(super) fn beside(&self, _name: &str) -> Self {
        match self.0 {}
    }

    pub(super) fn read(&self) -> Result<Bytes, Failed> {
        match self.0 {}
    }

    pub(super) fn read_range(&self, _range: &Range<u64>) -> Result<Bytes, Failed> {
        match self.0 {}
    }

    pub(super) fn fetch(&self, _range: Range<u64>) -> Result<(Bytes, Version), Failed> {
        match self.0 {}
    }

    pub(super) fn fetch_in_background(
        &self,
        _range: Range<u64>,
        _done: impl FnOnce(Option<(Bytes, Version)>) + Send + 'static,
    ) {
        match self.0 {}
    }

    pub(super) fn version(&self) -> Result<Version, Failed> {
        match self.0 {}
    }

    pub(super) fn list(&self) -> Result<Listing, Failed> {
        match self.0 {}
    }

    pub(super) fn list_folders(&self, _prefix: &str) -> Result<Listing, Failed> {
        match self.0 {}
    }

    pub(super) fn write(&self, _parts: &[Bytes]) -> Result<(), Failed> {
        match self.0 {}
    }

    pub(super) fn copy_beside(&self, _suffix: &str) -> Result<(), Failed> {
        match self.0 {}
    }

    pub(super) fn remove(&self) -> Result<(), Failed> {
        match self.0 {}
    }
}

pub(super) fn check_key(_key: &str) -> Result<(), String> {
    Ok(())
}

pub(super) fn is_transient(_error: &(dyn Error + Send + Sync + 'static)) -> bool {
    false
}

pub(super) fn is_refusal(_error: &(dyn Error + Send + Sync + 'static)) -> bool {
    false
}

pub(super) fn reason(error: &(dyn Error + Send + Sync + 'static)) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use crate::Reader as _;
    use crate::readers::CsvRows;
    use crate::storage::Storage;

    #[test]
    fn an_object_stores_address_says_which_feature_is_missing() {
        let expected = "s3://b/a.csv: this program was built without object stores; run `cargo add \
                        elasticdl --features cloud` and build it again; for a program in Python, \
                        install the package with `pip install -C \
                        build-args=--features=cloud,parquet`";
        assert_eq!(Storage::open("s3://b/a.csv").unwrap_err().to_string(), expected);
        let described = CsvRows::new().f32("y").describe("s3://b/a.csv");
        assert_eq!(described.unwrap_err().to_string(), expected);
        for address in ["gs://b/a", "az://b/a"] {
            assert!(
                Storage::open(address).unwrap_err().to_string().contains("without object stores")
            );
        }
        let other = Storage::open("ftp://b/a").unwrap_err().to_string();
        assert_eq!(
            other,
            "ftp://b/a: not a storage address; it must be a path or s3://, gs:// or az://"
        );
    }
}
