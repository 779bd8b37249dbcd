//! Folders of images, a folder for each class.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3Default;

use super::files::{self, Listed};
use super::kept::Kept;
use super::pixels::Shape;
use super::skipped::SkippedLog;
use super::versions;
use crate::reader::{Access, DataError, Dataset, File, Purpose, ReadOptions, Reader};

/// Reads PNG and JPEG images of one size, in a folder for each class: `cat/1.png`, `dog/a/7.jpg`.
///
/// The folders below the source are named as the classes are; an image in no such folder is
/// refused, unless predictions are made, which need no class. Images are records in the order of
/// their paths. Gray images become colour images, and the other way around, as the number of
/// channels requests; transparency is ignored. Images are not scaled: one of another size is
/// refused.
///
/// The first image of each class is decoded before training starts, and each image when it is read.
/// With `--bad-records skip` all images are decoded before training starts, and each worker decodes
/// them once to find those that are left out. Files end in `.png`, `.jpg` or `.jpeg`.
///
/// Requires the feature `images`.
///
/// ```
/// # extern crate elasticdl_data as elasticdl;
/// use elasticdl::readers::ImageFolder;
///
/// let reader = ImageFolder::new([224, 224, 3], ["cat", "dog"]);
/// ```
#[derive(Debug)]
pub struct ImageFolder {
    shape: Shape,
    classes: Vec<String>,
    options: ReadOptions,
    /// The images of each source.
    sources: BTreeMap<String, Images>,
}

/// An image and its class.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClassImage {
    /// The pixels, `[height · width · channels]`: row by row, the channels of a pixel together.
    pub pixels: Vec<u8>,
    /// Index of the class in the reader's list; 0 where predictions are made and it is unknown.
    pub class: usize,
    /// Path within the source, `cat/1.png`; empty if the source is this image. A column of it tells
    /// which image a row of predictions is about.
    pub path: Box<str>,
}

/// The images of a source.
#[derive(Debug)]
struct Images {
    root: PathBuf,
    /// The path of each image within the root, and its class.
    all: Vec<(Box<str>, usize)>,
    /// Digest of the paths and lengths of the images.
    version: u32,
    /// The images that are not left out, where images may be.
    kept: Option<Kept>,
}

impl ImageFolder {
    /// Creates a reader for images of the shape `[height, width, channels]`, with 1 channel (gray)
    /// or 3 (red, green, blue), and for the classes whose folders have these names.
    ///
    /// # Panics
    /// If a size is 0, the number of channels is neither 1 nor 3, there is no class, or a class
    /// appears twice.
    pub fn new<N: Into<String>>(shape: [usize; 3], classes: impl IntoIterator<Item = N>) -> Self {
        let classes: Vec<String> = classes.into_iter().map(Into::into).collect();
        assert!(!classes.is_empty(), "there is at least one class");
        for (i, class) in classes.iter().enumerate() {
            assert!(!classes[..i].contains(class), "the class {class:?} appears twice");
        }
        let (options, sources) = (ReadOptions::default(), BTreeMap::new());
        Self { shape: Shape::new(shape), classes, options, sources }
    }

    /// Lists the images of a source.
    fn list(&self, source: &str) -> Result<(Images, Listed), DataError> {
        let root = PathBuf::from(source);
        let (mut all, mut digest) = (Vec::new(), Xxh3Default::new());
        let listed = files::list(source, &EXTENSIONS.map(str::to_owned))?;
        for path in &listed.paths {
            // It is empty for a source that is an image itself.
            let within = path.strip_prefix(&root).unwrap_or(path);
            let class = self.class(path, within)?;
            let within = files::text(within)?;
            digest.update(within.as_bytes());
            digest.update(&[0]);
            digest.update(&files::length(path)?.to_le_bytes());
            all.push((within.into_boxed_str(), class));
        }
        Ok((Images { root, all, version: digest.digest() as u32, kept: None }, listed))
    }

    /// The class of an image, from its path within the source.
    fn class(&self, path: &Path, within: &Path) -> Result<usize, DataError> {
        let mut parts = within.components();
        let (folder, name) = (parts.next(), parts.next());
        let folder = folder.filter(|_| name.is_some()).and_then(|f| f.as_os_str().to_str());
        let class = folder.and_then(|folder| self.classes.iter().position(|c| c == folder));
        match (class, folder) {
            (Some(class), _) => Ok(class),
            (None, _) if self.options.purpose == Purpose::Predict => Ok(0),
            (None, folder) => {
                let classes = files::printable(&self.classes.join(", "));
                let reason = match folder {
                    Some(folder) => {
                        format!("the folder {folder:?} is none of the classes {classes}")
                    }
                    None => format!("it is in no folder of a class: {classes}"),
                };
                Err(files::malformed(path, &reason))
            }
        }
    }

    /// The images of a source that was described.
    fn images(&mut self, file: &File) -> Result<&Images, DataError> {
        if !self.sources.contains_key(&file.path) {
            let (mut images, _) = self.list(&file.path)?;
            if self.options.bad_records_max > 0 {
                images.kept = Some(self.find_kept(&images, None)?);
            }
            self.sources.insert(file.path.clone(), images);
        }
        let images = &self.sources[&file.path];
        let is_same = |version| match &images.kept {
            Some(_) => versions::is_of_same_file(version, images.version),
            None => version == images.version,
        };
        if !file.version.is_none_or(is_same) {
            let reason = format!("its {} images differ from the description", images.all.len());
            return Err(DataError::Changed { path: images.root.clone(), reason });
        }
        if let Some(kept) = &images.kept {
            files::check_left_out(file, &images.root, kept)?;
        }
        Ok(images)
    }

    /// Decodes all images. With a `log`, records those that are left out.
    fn find_kept(
        &self,
        images: &Images,
        mut log: Option<&mut SkippedLog>,
    ) -> Result<Kept, DataError> {
        let mut kept = Kept::default();
        for image in 0..images.all.len() {
            let read = images.read(image, self.shape);
            kept.push(read.is_ok());
            match (read, &mut log) {
                (Err(error @ DataError::Malformed { .. }), Some(log)) => log.skip_bad(|| error)?,
                (Err(DataError::Malformed { .. }), None) | (Ok(_), _) => {}
                (Err(error), _) => return Err(error),
            }
        }
        Ok(kept)
    }
}

impl Images {
    /// Number of images that are records.
    fn count(&self) -> u64 {
        self.kept.as_ref().map_or(self.all.len() as u64, Kept::count)
    }

    fn path(&self, image: usize) -> PathBuf {
        let (within, _) = &self.all[image];
        // The source may be an image itself.
        if within.is_empty() { self.root.clone() } else { self.root.join(&**within) }
    }

    fn read(&self, image: usize, shape: Shape) -> Result<ClassImage, DataError> {
        let path = self.path(image);
        let bytes = files::read(&path, 0, files::length(&path)?)?;
        let pixels = shape.decode(&bytes).map_err(|reason| files::malformed(&path, &reason))?;
        let (within, class) = &self.all[image];
        Ok(ClassImage { pixels, class: *class, path: within.clone() })
    }

    /// The image that is record `record`.
    fn image(&self, record: u64) -> Option<usize> {
        let image = self.kept.as_ref().map_or(record, |kept| kept.row(record));
        (record < self.count()).then_some(image as usize)
    }
}

impl Reader for ImageFolder {
    type Record = ClassImage;

    fn configure(&mut self, options: ReadOptions) -> Result<(), DataError> {
        self.options = options;
        Ok(())
    }

    /// Describes the source as one file.
    fn describe(&mut self, source: &str) -> Result<Dataset, DataError> {
        let source = source.strip_prefix("file://").unwrap_or(source);
        let (mut images, others) = self.list(source)?;
        let mut log = SkippedLog::new(self.options.bad_records_max);
        if self.options.bad_records_max > 0 {
            images.kept = Some(self.find_kept(&images, Some(&mut log))?);
        } else {
            for class in 0..self.classes.len() {
                if let Some(first) = images.all.iter().position(|(_, c)| *c == class) {
                    images.read(first, self.shape)?;
                }
            }
        }
        let kept = images.kept.as_ref();
        let version = kept.map_or(images.version, |k| files::version_without(images.version, k));
        let file =
            File { path: source.to_owned(), records: images.count(), version: Some(version) };
        self.sources.insert(source.to_owned(), images);
        let mut dataset = Dataset::new(vec![file]);
        dataset.skipped = log.into_skipped();
        others.note_others(&mut dataset.skipped);
        files::not_empty(source, dataset, "no image")
    }

    fn access(&self, _dataset: &Dataset) -> Access {
        Access::Record
    }

    fn read_ahead(&mut self, file: &File, range: Range<u64>) {
        let Some(images) = self.sources.get(&file.path) else { return };
        for image in range.filter_map(|record| images.image(record)) {
            files::read_ahead(&images.path(image), 0, u64::MAX);
        }
    }

    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<ClassImage>, DataError> {
        let shape = self.shape;
        let images = self.images(file)?;
        let read = |record: u64| match images.image(record) {
            Some(image) => images.read(image, shape),
            None => {
                let reason = format!("{} images where more should be", images.count());
                Err(DataError::Changed { path: images.root.clone(), reason })
            }
        };
        range.map(read).collect()
    }
}

const EXTENSIONS: [&str; 3] = ["jpeg", "jpg", "png"];

#[cfg(test)]
pub(super) mod tests;
