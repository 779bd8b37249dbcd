//! Local files, written atomically like objects in a store.

use std::hash::{BuildHasher as _, RandomState};
use std::io::Write as _;
use std::sync::Arc;

use bytes::Bytes;
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::path::Path;

/// The local file systems as a store.
pub(super) fn store() -> Arc<dyn ObjectStore> {
    // Empty folders stay: another process may be about to write into them.
    Arc::new(LocalFileSystem::new().with_fsync(true))
}

/// Writes a local file as its store would, but sequentially in this thread: parts that several
/// threads write reach the disk out of order.
pub(super) fn write(at: &Path, parts: &[Bytes]) -> object_store::Result<()> {
    let failed = |source: std::io::Error| object_store::Error::Generic {
        store: "LocalFileSystem",
        source: Box::new(source),
    };
    let path = LocalFileSystem::new().path_to_filesystem(at)?;
    let folder = path.parent().unwrap_or_else(|| std::path::Path::new("/"));
    std::fs::create_dir_all(folder).map_err(failed)?;
    // Listings skip names with this ending. It is random, as writers on other machines may have the
    // same process id.
    let mut staged = path.clone().into_os_string();
    staged.push(format!("#{}", RandomState::new().hash_one(std::process::id())));
    let written = std::fs::OpenOptions::new().write(true).create_new(true).open(&staged).and_then(
        |mut file| {
            parts.iter().try_for_each(|part| file.write_all(part))?;
            file.sync_all()?;
            std::fs::rename(&staged, &path)
        },
    );
    if written.is_err() {
        drop(std::fs::remove_file(&staged));
    }
    // Syncs the directory entries too, of the file and of a folder that was just created, where the
    // system allows it.
    for folder in folder.ancestors().take(2) {
        drop(std::fs::File::open(folder).and_then(|folder| folder.sync_all()));
    }
    written.map_err(failed)
}
