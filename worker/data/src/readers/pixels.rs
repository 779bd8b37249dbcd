//! Decodes PNG and JPEG images.

use std::fmt::Debug;

use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;
use zune_png::PngDecoder;

/// The shape of a decoded image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    height: usize,
    width: usize,
    channels: usize,
}

impl Shape {
    /// A shape of `[height, width, channels]`.
    ///
    /// # Panics
    /// If a size is not from 1 to 65,535, or the number of channels is neither 1 nor 3.
    pub(super) fn new([height, width, channels]: [usize; 3]) -> Self {
        for size in [height, width] {
            assert!((1..=SIZE_MAX).contains(&size), "{size} where 1 to {SIZE_MAX} should be");
        }
        assert!(channels == 1 || channels == 3, "{channels} channels where 1 or 3 should be");
        Self { height, width, channels }
    }

    /// The pixels of an image, `[height · width · channels]`, or why it has none of this shape.
    pub(super) fn decode(self, bytes: &[u8]) -> Result<Vec<u8>, String> {
        // Whatever is cut off or damaged is an error, not a gray area.
        let options = DecoderOptions::default()
            .set_strict_mode(true)
            .png_set_confirm_crc(true)
            .png_set_strip_to_8bit(true)
            .png_set_decode_animated(false)
            .set_max_height(SIZE_MAX)
            .set_max_width(SIZE_MAX);
        let (pixels, found) = if bytes.starts_with(PNG) {
            let mut decoder = PngDecoder::new_with_options(ZCursor::new(bytes), options);
            decoder.decode_headers().map_err(failed)?;
            // The size is known before memory for the pixels is needed.
            self.check(decoder.dimensions())?;
            let pixels = decoder.decode_raw().map_err(failed)?;
            (pixels, decoder.colorspace())
        } else if bytes.starts_with(JPEG) {
            let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
            decoder.decode_headers().map_err(failed)?;
            self.check(decoder.dimensions())?;
            let is_gray = decoder.input_colorspace() == Some(ColorSpace::Luma);
            let wanted = if is_gray { ColorSpace::Luma } else { ColorSpace::RGB };
            decoder.set_options(options.jpeg_set_out_colorspace(wanted));
            (decoder.decode().map_err(failed)?, Some(wanted))
        } else {
            return Err("neither a PNG nor a JPEG image".into());
        };
        let channels = match found {
            Some(ColorSpace::Luma) => 1,
            Some(ColorSpace::LumaA) => 2,
            Some(ColorSpace::RGB) => 3,
            Some(ColorSpace::RGBA) => 4,
            found => return Err(format!("the image has unsupported colours: {found:?}")),
        };
        let area = self.height * self.width;
        if pixels.len() != area * channels {
            let (bytes, area) = (pixels.len(), area * channels);
            return Err(format!("the image cannot be decoded: {bytes} bytes of {area}"));
        }
        Ok(self.convert(&pixels, channels))
    }

    fn check(self, found: Option<(usize, usize)>) -> Result<(), String> {
        let (width, height) = found.ok_or("the image cannot be decoded: it has no size")?;
        if (height, width) == (self.height, self.width) {
            return Ok(());
        }
        Err(format!(
            "an image of {height}x{width} pixels (height, width) where one of {}x{} should be",
            self.height, self.width
        ))
    }

    /// Pixels of so many channels, of which the second or fourth is transparency, in as many as are
    /// requested.
    fn convert(self, pixels: &[u8], channels: usize) -> Vec<u8> {
        let mut converted = Vec::with_capacity(self.height * self.width * self.channels);
        for pixel in pixels.chunks_exact(channels) {
            match (pixel, self.channels) {
                ([gray] | [gray, _], channels) => {
                    converted.extend(std::iter::repeat_n(*gray, channels));
                }
                ([red, green, blue, ..], 1) => converted.push(luma([*red, *green, *blue])),
                (colour, _) => converted.extend(&colour[..3]),
            }
        }
        converted
    }
}

/// Brightness of a colour, as ITU-R BT.601 weighs it: JPEG, and Pillow's mode `L`, do the same.
fn luma([red, green, blue]: [u8; 3]) -> u8 {
    let sum = 299 * u32::from(red) + 587 * u32::from(green) + 114 * u32::from(blue);
    ((sum + 500) / 1000) as u8
}

fn failed(error: impl Debug) -> String {
    format!("the image cannot be decoded: {error:?}")
}

const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";
const JPEG: &[u8] = &[0xff, 0xd8, 0xff];
/// Greatest height and width of a JPEG image.
const SIZE_MAX: usize = 65_535;
