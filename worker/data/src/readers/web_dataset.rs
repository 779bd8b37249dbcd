//! Samples in tar files, as WebDataset stores them.

use std::collections::BTreeMap;
use std::io::BufReader;
use std::ops::Range;
use std::path::Path;

use super::files;
use super::kept::Kept;
use super::pixels::Shape;
use super::row::{Row, Value};
use super::skipped::SkippedLog;
use crate::reader::{Access, DataError, Dataset, File, Purpose, ReadOptions, Reader};
use samples::{Part, Sample};

mod samples;

/// Reads samples of tar files in WebDataset's layout: consecutive members whose names differ in
/// what follows the first dot of the file's name, `0001.jpg` and `0001.cls`, are a sample.
///
/// Name the required members by what follows that dot, in the order in which they should appear in
/// the [`Row`]; alternatives are separated by semicolons, `jpg;jpeg;png`. Other members are
/// ignored. In folders, files that end in `.tar` are read. Compressed tar files are refused, as
/// records are read in any order.
///
/// Each worker reads the headers of a file's members once. Before training starts, all samples are
/// checked for the required members, and the first sample of each file is decoded; other members
/// are decoded when they are read. With `--bad-records skip` all samples are decoded before
/// training starts, and each worker decodes them once to find those that are left out.
///
/// Requires the feature `web-dataset`.
///
/// ```
/// # extern crate elasticdl_data as elasticdl;
/// use elasticdl::readers::WebDataset;
///
/// let reader = WebDataset::new().image("jpg;png", [224, 224, 3]).class("cls", 1000).label();
/// ```
///
/// The layout: the WebDataset format, <https://github.com/webdataset/webdataset>.
#[derive(Debug, Default)]
pub struct WebDataset {
    members: Vec<Member>,
    options: ReadOptions,
    tars: BTreeMap<String, Tar>,
}

/// A requested member of each sample.
#[derive(Debug)]
struct Member {
    /// The extensions that it may have, in lower case.
    extensions: Vec<String>,
    kind: Kind,
    is_label: bool,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Bytes,
    /// An integer below this.
    Class(usize),
    Image(Shape),
    /// The key of the sample, which is in no member.
    Key,
    Text,
}

/// The samples of a file.
#[derive(Debug)]
struct Tar {
    samples: Vec<Sample>,
    /// The samples that are not left out, where samples may be.
    kept: Option<Kept>,
}

impl WebDataset {
    /// Creates a reader without members; add the required ones.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a PNG or JPEG image of the shape `[height, width, channels]`, with 1 channel (gray) or
    /// 3 (red, green, blue). [`Row::bytes`] returns its pixels, row by row. An image of another
    /// size is refused.
    ///
    /// # Panics
    /// If a size is 0, or the number of channels is neither 1 nor 3.
    #[must_use]
    pub fn image(self, extensions: &str, shape: [usize; 3]) -> Self {
        self.member(extensions, Kind::Image(Shape::new(shape)))
    }

    /// Adds a class: a decimal integer from 0 to `classes` less one, which [`Row::class`] returns.
    ///
    /// # Panics
    /// If `classes` is 0.
    #[must_use]
    pub fn class(self, extensions: &str, classes: usize) -> Self {
        assert!(classes > 0, "there is at least one class");
        self.member(extensions, Kind::Class(classes))
    }

    /// Adds a text in UTF-8, which [`Row::text`] returns.
    #[must_use]
    pub fn text(self, extensions: &str) -> Self {
        self.member(extensions, Kind::Text)
    }

    /// Adds a member of any content, which [`Row::bytes`] returns.
    #[must_use]
    pub fn bytes(self, extensions: &str) -> Self {
        self.member(extensions, Kind::Bytes)
    }

    /// Adds the key of the sample, which [`Row::text`] returns: the path of its members up to the
    /// first dot of the file's name. A column of it tells which sample a row of predictions is
    /// about.
    #[must_use]
    pub fn key(mut self) -> Self {
        self.members.push(Member { extensions: Vec::new(), kind: Kind::Key, is_label: false });
        self
    }

    /// Marks the member that was added last as the label. `elasticdl predict` also reads samples
    /// without it: the value is then 0, or empty.
    ///
    /// # Panics
    /// If there is no member yet, or it is an image.
    #[must_use]
    pub fn label(mut self) -> Self {
        let last = self.members.last_mut().expect("label() follows the member that it is for");
        assert!(!matches!(last.kind, Kind::Image(_)), "an image is no label");
        last.is_label = true;
        self
    }

    fn member(mut self, extensions: &str, kind: Kind) -> Self {
        let extensions = extensions.split(';').map(|e| e.trim().to_lowercase()).collect();
        self.members.push(Member { extensions, kind, is_label: false });
        self
    }

    /// Finds the samples of a file, unless they are known.
    fn tar(&mut self, path: &Path, name: &str) -> Result<&Tar, DataError> {
        if !self.tars.contains_key(name) {
            let mut tar = Tar { samples: self.find_samples(path)?, kept: None };
            if self.options.bad_records_max > 0 {
                tar.kept = Some(self.find_kept(path, &tar.samples, None)?);
            }
            self.tars.insert(name.to_owned(), tar);
        }
        Ok(&self.tars[name])
    }

    fn find_samples(&self, path: &Path) -> Result<Vec<Sample>, DataError> {
        let bytes = files::length(path)?;
        let requested: Vec<&[String]> = self.members.iter().map(|m| &m.extensions[..]).collect();
        let source = BufReader::new(files::open(path)?);
        samples::find(source, bytes, &requested).map_err(|error| match error {
            samples::FindError::Io(source) => files::io_error(path, source),
            samples::FindError::Malformed(reason) => files::malformed(path, &reason),
        })
    }

    /// Decodes all samples. With a `log`, records those that are left out.
    fn find_kept(
        &self,
        path: &Path,
        samples: &[Sample],
        mut log: Option<&mut SkippedLog>,
    ) -> Result<Kept, DataError> {
        let mut kept = Kept::default();
        for sample in samples {
            let read = self.read_sample(path, sample);
            kept.push(read.is_ok());
            match (read, &mut log) {
                (Err(error @ DataError::Malformed { .. }), Some(log)) => log.skip_bad(|| error)?,
                (Err(DataError::Malformed { .. }), None) | (Ok(_), _) => {}
                (Err(error), _) => return Err(error),
            }
        }
        Ok(kept)
    }

    fn read_sample(&self, path: &Path, sample: &Sample) -> Result<Row, DataError> {
        let wrong = |member: &Member, reason: &str| {
            let (key, extension) = (&sample.key, member.extensions.join(";"));
            files::malformed(path, &format!("sample {key:?}, {extension:?}: {reason}"))
        };
        let values = self.members.iter().zip(&sample.parts).map(|(member, part)| {
            let Some(Part { start, bytes }) = *part else {
                let value = self.missing(member, sample);
                return value.ok_or_else(|| wrong(member, "the sample lacks it"));
            };
            let content = files::read(path, start, bytes)?;
            member.value(content).map_err(|reason| wrong(member, &reason))
        });
        Ok(Row::new(values.collect::<Result<_, _>>()?))
    }

    /// The value of a member that a sample lacks; `None` if it may not.
    fn missing(&self, member: &Member, sample: &Sample) -> Option<Value> {
        let may_lack = member.is_label && self.options.purpose == Purpose::Predict;
        (may_lack || matches!(member.kind, Kind::Key)).then(|| match member.kind {
            Kind::Class(_) => Value::Class(0),
            Kind::Key => Value::Text(sample.key.clone()),
            Kind::Text => Value::Text(String::new()),
            Kind::Bytes | Kind::Image(_) => Value::Bytes(Vec::new()),
        })
    }

    /// Checks that all samples have the required members, and that the first one can be read.
    fn check(&self, path: &Path, samples: &[Sample]) -> Result<(), DataError> {
        let lacks = |sample: &&Sample| {
            let mut parts = self.members.iter().zip(&sample.parts);
            parts.any(|(member, part)| part.is_none() && self.missing(member, sample).is_none())
        };
        let first = samples.iter().find(lacks).or_else(|| samples.first());
        first.map_or(Ok(()), |sample| self.read_sample(path, sample).map(drop))
    }
}

impl Member {
    fn value(&self, content: Vec<u8>) -> Result<Value, String> {
        let text = |content: Vec<u8>| {
            String::from_utf8(content).map_err(|_| "bytes that are not UTF-8".to_owned())
        };
        match self.kind {
            Kind::Bytes => Ok(Value::Bytes(content)),
            Kind::Class(classes) => {
                let text = text(content)?;
                let class = text.trim().parse().ok().filter(|class| *class < classes);
                class.map(Value::Class).ok_or_else(|| {
                    let text = files::printable(text.trim());
                    format!("\"{text}\" where an integer from 0 to {} should be", classes - 1)
                })
            }
            Kind::Image(shape) => shape.decode(&content).map(Value::Bytes),
            Kind::Key | Kind::Text => text(content).map(Value::Text),
        }
    }
}

impl Tar {
    /// Number of samples that are records.
    fn count(&self) -> u64 {
        self.kept.as_ref().map_or(self.samples.len() as u64, Kept::count)
    }

    /// The sample that is record `record`.
    fn sample(&self, record: u64) -> Option<&Sample> {
        let sample = self.kept.as_ref().map_or(record, |kept| kept.row(record));
        self.samples.get(sample as usize).filter(|_| record < self.count())
    }
}

impl Reader for WebDataset {
    type Record = Row;

    fn configure(&mut self, options: ReadOptions) -> Result<(), DataError> {
        self.options = options;
        Ok(())
    }

    fn describe(&mut self, source: &str) -> Result<Dataset, DataError> {
        let mut dataset = Dataset::default();
        let mut log = SkippedLog::new(self.options.bad_records_max);
        let listed = files::list(source, &["tar".to_owned()])?;
        for path in &listed.paths {
            let mut tar = Tar { samples: self.find_samples(path)?, kept: None };
            if self.options.bad_records_max > 0 {
                tar.kept = Some(self.find_kept(path, &tar.samples, Some(&mut log))?);
            } else {
                self.check(path, &tar.samples)?;
            }
            let text = files::text(path)?;
            if tar.count() > 0 {
                let mut version = files::version(&[path])?;
                if let Some(kept) = &tar.kept {
                    version = files::version_without(version, kept);
                }
                let (path, version) = (text.clone(), Some(version));
                dataset.files.push(File { path, records: tar.count(), version });
            }
            self.tars.insert(text, tar);
        }
        dataset.skipped = log.into_skipped();
        listed.note_others(&mut dataset.skipped);
        files::not_empty(source, dataset, "no sample in any tar file")
    }

    fn access(&self, dataset: &Dataset) -> Access {
        if files::is_remote(dataset) {
            Access::Block { records: BLOCK_SAMPLES }
        } else {
            Access::Record
        }
    }

    fn read_ahead(&mut self, file: &File, range: Range<u64>) {
        let Some(tar) = self.tars.get(&file.path) else { return };
        let mut parts = range.filter_map(|record| tar.sample(record)).flat_map(|sample| {
            sample.parts.iter().flatten().map(|part| (part.start, part.start + part.bytes))
        });
        let Some(first) = parts.next() else { return };
        let (start, end) = parts.fold(first, |(a, b), (c, d)| (a.min(c), b.max(d)));
        files::read_ahead(Path::new(&file.path), start, end - start);
    }

    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<Row>, DataError> {
        let path = Path::new(&file.path);
        files::check_table(file, &[path], self.options.bad_records_max > 0)?;
        self.tar(path, &file.path)?;
        let tar = &self.tars[&file.path];
        if let Some(kept) = &tar.kept {
            files::check_left_out(file, path, kept)?;
        }
        let read = |record: u64| match tar.sample(record) {
            Some(sample) => self.read_sample(path, sample),
            None => {
                let reason =
                    format!("{} samples where more should be: has it changed?", tar.count());
                Err(files::malformed(path, &reason))
            }
        };
        range.map(read).collect()
    }
}

/// Samples of a block of an object.
const BLOCK_SAMPLES: u64 = 64;

#[cfg(test)]
pub(super) mod tests;
