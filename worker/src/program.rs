//! What identifies the program of this process.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher as _};
use std::io::Read;
use std::path::Path;

use elasticdl_tables::Table;
use object::{Object as _, ReadCache};
use xxhash_rust::xxh3::xxh3_64;

use crate::external::SourceFile;
use crate::model::NamedTensor;
use crate::session::header::encode;
use crate::session::origin::{Origin, Program};
use crate::update::UpdateRule;

/// The origin of this process's replica. `node`: where it runs, if the launcher knows. `sources`:
/// the files of an interpreted program. The settings of a rule that is no optimizer are not known.
pub(crate) fn origin(
    node: &str,
    sources: &[SourceFile],
    tensors: &[NamedTensor],
    tables: &[Table],
    rule: &dyn UpdateRule,
) -> Origin {
    let host = match node {
        "" => fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default(),
        node => node.to_owned(),
    };
    let layout: Vec<_> = tensors.iter().map(|tensor| (&tensor.name, &tensor.shape)).collect();
    let of_tables = |table: &Table| (table.name.clone(), table.dim, table.initialization);
    let rows: Vec<_> = tables.iter().map(of_tables).collect();
    let of_rows = |table: &Table| (table.optimizer, table.admission, table.eviction);
    let of_rows: Vec<_> = tables.iter().map(of_rows).collect();
    let program = Program {
        executable: digest_of_executable(Path::new("/proc/self/exe")).unwrap_or(0),
        files: digests_of(sources),
        version: env!("CARGO_PKG_VERSION").into(),
        tensors: xxh3_64(&encode(&(layout, rows))),
        optimizer: xxh3_64(format!("{:?} {of_rows:?}", rule.as_optimizer()).as_bytes()),
    };
    Origin { host: host.trim().into(), program, serves_tables: false }
}

/// The program as checkpoints name it. `settings`: those with which an interpreted program makes
/// its optimizer. They may differ within a group, whose state has the ones that count.
pub(crate) fn with_settings(program: &Program, settings: &str) -> Program {
    let optimizer = match settings {
        "" => program.optimizer,
        settings => xxh3_64(&encode(&(program.optimizer, settings))),
    };
    Program { optimizer, ..program.clone() }
}

/// Digests of source files by name. Those beyond a bound have one digest together, as a group's
/// headers contain them.
fn digests_of(sources: &[SourceFile]) -> BTreeMap<String, u64> {
    let digest = |file: &SourceFile| xxh3_64(&fs::read(&file.path).unwrap_or_default());
    let name = |file: &SourceFile| {
        let start = file.name.ceil_char_boundary(file.name.len().saturating_sub(NAME_BYTES_MAX));
        file.name[start..].to_owned()
    };
    let mut digests: BTreeMap<_, _> = sources.iter().map(|f| (name(f), digest(f))).collect();
    if digests.len() > SOURCES_MAX {
        let rest: Vec<_> = digests.iter().skip(SOURCES_MAX).collect();
        let (more, of_rest) = (format!("{} more files", rest.len()), xxh3_64(&encode(&rest)));
        digests = digests.into_iter().take(SOURCES_MAX).collect();
        digests.insert(more, of_rest);
    }
    digests
}

/// Digest of the build id, which the linker computes of an executable's content, and of the file's
/// length: to read all of 260 MB would delay each start by 0.1 s. Of the whole file, where the
/// linker was told to write no build id.
fn digest_of_executable(path: &Path) -> Option<u64> {
    let file = File::open(path).ok()?;
    let bytes = file.metadata().ok()?.len();
    let cache = ReadCache::new(file);
    let id = object::File::parse(&cache).ok().and_then(|object| object.build_id().ok().flatten());
    id.map(|id| xxh3_64(&encode(&(id, bytes)))).or_else(|| digest_of_file(path))
}

/// The standard library's hash is fast in a program that is built without optimization, too. It may
/// differ between releases of Rust: then the executables differ anyway.
fn digest_of_file(path: &Path) -> Option<u64> {
    let mut file = File::open(path).ok()?;
    let (mut digest, mut buffer) = (DefaultHasher::new(), vec![0; BUFFER_BYTES]);
    loop {
        match file.read(&mut buffer).ok()? {
            0 => return Some(digest.finish()),
            bytes => digest.write(&buffer[..bytes]),
        }
    }
}

/// Source files with a digest of their own.
const SOURCES_MAX: usize = 100;
const NAME_BYTES_MAX: usize = 120;

const BUFFER_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn each_source_has_a_digest_by_its_name_and_those_beyond_a_bound_have_one_together() {
        let folder = tempfile::tempdir().unwrap();
        let write = |i: usize, text: &str| {
            let path = folder.path().join(i.to_string());
            fs::write(&path, text).unwrap();
            SourceFile { name: format!("{i:03}.py"), path }
        };
        let mut sources: Vec<_> = (0..SOURCES_MAX + 3).map(|i| write(i, "LAYERS = 2")).collect();
        let names = |digests: BTreeMap<String, u64>| digests.into_keys().collect::<Vec<_>>();
        assert_eq!(names(digests_of(&sources[..2])), ["000.py", "001.py"]);
        let before = digests_of(&sources);
        assert_eq!(before.len(), SOURCES_MAX + 1);
        write(SOURCES_MAX + 1, "LAYERS = 3");
        write(7, "LAYERS = 3");
        let after = digests_of(&sources);
        let differing = before.iter().filter(|&(name, digest)| after[name] != *digest);
        assert_eq!(differing.map(|(name, _)| name).collect::<Vec<_>>(), ["007.py", "3 more files"]);
        let long = format!("{}/é/net.py", "x".repeat(NAME_BYTES_MAX - 8));
        sources[0].name = long;
        let cut = names(digests_of(&sources[..1])).remove(0);
        assert!(cut.len() <= NAME_BYTES_MAX && cut.ends_with("x/é/net.py"), "{cut}");
    }

    #[test]
    fn an_executable_is_identified_by_its_build_id_and_its_length() {
        let folder = tempfile::tempdir().unwrap();
        let (own, copy) = (Path::new("/proc/self/exe"), folder.path().join("copy"));
        fs::copy(own, &copy).unwrap();
        let same = digest_of_executable(own);
        assert!(same.is_some() && same == digest_of_executable(&copy));
        fs::OpenOptions::new().append(true).open(&copy).unwrap().write_all(b"\n").unwrap();
        assert_ne!(same, digest_of_executable(&copy));
        // A program without a build id, such as a script.
        fs::write(&copy, "#!/bin/sh").unwrap();
        let script = digest_of_executable(&copy);
        assert!(script.is_some() && script == digest_of_file(&copy));
    }
}
